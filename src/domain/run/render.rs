//! Templates become text: bounded in length, depth, work and size, and once only.
//!
//! What an error says comes from the template alone: never a value that it was given.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::{self, Write};

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value,
    escape_formatter, filters,
};

/// The longest payload that a template may render to, in bytes.
pub const RENDERED_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The longest template, in bytes.
pub const TEMPLATE_BYTES_MAX: usize = 64 * 1024;
/// The most tokens of one tag, and the most `elif`s of a template. The parser's own limit is for
/// parentheses and blocks only: every `not`, `.`, `|` or operator is one more level of its stack.
const NESTING_MAX: usize = 500;
/// What all that one [`Renderer`] renders may take: an instruction, or 64 bytes that are made or
/// written, cost one.
const FUEL: u64 = 1_000_000;
/// The most of a template's own text that an error repeats, in bytes.
const QUOTED_BYTES_MAX: usize = 100;

/// Templates with what they see.
pub(super) struct Renderer {
    /// Its fuel is what is left.
    environment: RefCell<Environment<'static>>,
    context: Value,
}

impl Renderer {
    pub fn new(context: &serde_json::Map<String, serde_json::Value>) -> Self {
        Self {
            environment: RefCell::new(environment()),
            context: Value::from(Serde(context)),
        }
    }

    /// At most this many bytes of text.
    ///
    /// # Errors
    /// A sentence about what is wrong with the template.
    pub fn render(&self, template: &str, bytes_max: usize) -> Result<String, String> {
        check_nesting(template)?;
        let told = |error: &Error| told(error, template, bytes_max);
        let mut written = Bounded {
            bytes: Vec::new(),
            bytes_max,
        };
        let left = {
            let environment = self.environment.borrow();
            let compiled = environment.template_from_str(template);
            let rendered = compiled.and_then(|compiled| {
                compiled.render_captured_to(self.context.clone(), &mut written)
            });
            let rendered = rendered.map_err(|error| told(&error))?;
            rendered.state().fuel_levels().map(|(_, left)| left)
        };
        self.environment.borrow_mut().set_fuel(left);
        String::from_utf8(written.bytes).map_err(|_| "it renders to what is no text".to_owned())
    }
}

/// What a template asks for, as `name` or `name.attribute`.
///
/// # Errors
/// A sentence about why it can't be compiled.
pub(in crate::domain) fn asks_for(template: &str) -> Result<BTreeSet<String>, String> {
    check_nesting(template)?;
    let environment = environment();
    let compiled = environment.template_from_str(template);
    let compiled = compiled.map_err(|error| told(&error, template, RENDERED_BYTES_MAX))?;
    let mut names: BTreeSet<_> = compiled.undeclared_variables(true).into_iter().collect();
    for (name, _) in environment.globals() {
        names.remove(name);
    }
    Ok(names)
}

/// Whether the parser, which calls itself, finds its end before that of its stack.
fn check_nesting(template: &str) -> Result<(), String> {
    if template.len() > TEMPLATE_BYTES_MAX {
        return Err(format!("it is longer than {TEMPLATE_BYTES_MAX} bytes"));
    }
    let (mut in_tag, mut elifs) = (0, 0);
    // What can't be read is told by who compiles it.
    let tokens = tokenize(template, false, SyntaxConfig::default()).map_while(Result::ok);
    for (token, span) in tokens {
        match token {
            Token::VariableStart | Token::BlockStart => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => in_tag += 1,
        }
        if in_tag > NESTING_MAX || elifs > NESTING_MAX {
            let line = span.start_line;
            return Err(format!(
                "more than {NESTING_MAX} words, operators or `elif`s depend on each other, line {line}"
            ));
        }
    }
    Ok(())
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(write);
    environment.add_filter("tojson", tojson);
    environment.set_fuel(Some(FUEL));
    // Only so that errors know their place; what they know else is never shown.
    environment.set_debug(true);
    environment
}

/// As the filter of this name, but that what is not there is an error and no `null`.
fn tojson(value: &Value, indent: Option<Value>, args: Kwargs) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(ErrorKind::UndefinedError.into());
    }
    filters::tojson(value, indent, args)
}

/// What is no text and no number is written as JSON, so that `{{ input.paid }}` within a JSON text
/// is JSON too.
fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool | ValueKind::None | ValueKind::Seq | ValueKind::Map => {
            let json = serde_json::to_string(value);
            let json = json.map_err(|_| Error::from(ErrorKind::BadSerialization))?;
            out.write_str(&json).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

fn told(error: &Error, template: &str, bytes_max: usize) -> String {
    let what = match error.kind() {
        ErrorKind::WriteFailure => format!("it renders to more than {bytes_max} bytes"),
        ErrorKind::OutOfFuel => "it takes too much work".to_owned(),
        kind => kind.to_string(),
    };
    let quoted = error.range().and_then(|range| template.get(range));
    let quoted = quoted.filter(|text| text.len() <= QUOTED_BYTES_MAX);
    match (quoted, error.line()) {
        (Some(text), Some(line)) => format!("{what} at `{}`, line {line}", text.trim()),
        (None, Some(line)) => format!("{what}, line {line}"),
        _ => what,
    }
}

/// Takes so much and no more.
struct Bounded {
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.bytes_max {
            return Err(io::Error::other("too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(template: &str) -> Result<String, String> {
        let context = json!({ "input": { "name": "<A & \"B\">", "card": "4242", "n": 3 } });
        Renderer::new(context.as_object().unwrap()).render(template, RENDERED_BYTES_MAX)
    }

    #[test]
    fn text_is_rendered_as_it_is_and_json_is_written_as_json() {
        assert_eq!(render("{{ input.name }}").unwrap(), "<A & \"B\">");
        let text = "{{ input.n == 3 }} {{ none }} {{ [input.n, 'a', none] }} {{ input.n }}";
        assert_eq!(render(text).unwrap(), r#"true null [3,"a",null] 3"#);
        let json: serde_json::Value =
            serde_json::from_str(&render("{{ input | tojson }}").unwrap()).unwrap();
        assert_eq!(json["name"], "<A & \"B\">");
        assert_eq!(
            render("{{ input.name | urlencode }}").unwrap(),
            "%3CA%20%26%20%22B%22%3E"
        );
    }

    #[test]
    fn a_missing_field_is_an_error_that_names_it_and_no_value() {
        let error = render("{{ input.card }}\n{{ input.nam }}").unwrap_err();
        assert!(
            error.contains("input.nam") && error.contains("line 2"),
            "{error}"
        );
        assert!(!error.contains("4242"), "{error}");
        let error = render("{\"a\": {{ input.nam | tojson }}}").unwrap_err();
        assert!(error.contains("undefined"), "{error}");
        let may_be_missing = "{{ input.nam | default(none) | tojson }}";
        assert_eq!(render(may_be_missing).unwrap(), "null");
        for wrong in [
            "{{ input.card + 1 }}",
            "{{ input.card.x.y }}",
            "{{ input.card() }}",
        ] {
            let error = render(wrong).unwrap_err();
            assert!(!error.contains("4242"), "{error}");
        }
    }

    #[test]
    fn work_and_size_are_bounded_and_nothing_is_loaded() {
        let error = render(
            "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
        );
        assert!(error.unwrap_err().contains("too much work"));
        let error = render("{{ 'x' * 9000000 }}").unwrap_err();
        assert!(error.contains("more than 8388608 bytes"), "{error}");
        assert!(render("{% include '/etc/passwd' %}").is_err());
        assert!(asks_for("{{ input").is_err());
        assert!(asks_for("{% if a %}").unwrap_err().contains("line 1"));
        assert!(asks_for("plain").is_ok());
    }

    #[test]
    fn what_one_rendering_took_the_next_has_less() {
        let renderer = Renderer::new(&serde_json::Map::new());
        let template = "{% for i in range(40000) %}{% endfor %}";
        let texts = (0..100).map(|_| renderer.render(template, 10));
        let texts: Vec<_> = texts.collect();
        assert!(texts[0].is_ok(), "{texts:?}");
        assert!(texts[99].as_ref().unwrap_err().contains("too much work"));
        let error = renderer.render("more than ten bytes", 10).unwrap_err();
        assert!(error.contains("more than 10 bytes"), "{error}");
    }

    #[test]
    fn a_template_tells_what_it_asks_for() {
        let asked = "{% set own = input.id %}{{ own }}{{ range(3) }}{{ steps.one.body.x }}";
        let asked = asks_for(asked).unwrap();
        let asked: Vec<_> = asked.iter().map(String::as_str).collect();
        assert_eq!(asked, ["input.id", "steps.one.body.x"]);
    }

    /// Each would end the process if the parser met it whole, on the stack of a worker thread.
    #[test]
    fn no_template_is_deeper_than_the_stack() {
        let chains = [
            ("{{ ", "not ", "a }}"),
            ("{{ ", "-", "1 }}"),
            ("{{ a", ".b", " }}"),
            ("{{ a", "+a", " }}"),
            ("{{ a", "|e", " }}"),
            ("{{ a", "[0]", " }}"),
            ("{{ a", "()", " }}"),
            ("{{ a", "~a", " }}"),
            ("{{ a", " and a", " }}"),
            ("{{ a", " < a", " }}"),
            ("{{ a", " if a else a", " }}"),
            ("{{ ", "(", "a"),
            ("{{ ", "[", "a"),
            ("{{ ", "{1:", "a"),
            ("{% if a %}", "{% elif a %}", "{% endif %}"),
            ("", "{% if a %}", ""),
            ("", "{% for a in a %}", ""),
            ("{{ {1:{1:2}}", " + {1:{1:2}}", " }}"),
            ("{{ '}}'", "~a", " }}"),
        ];
        let parse = move || {
            for (start, link, end) in chains {
                let longest = (TEMPLATE_BYTES_MAX - start.len() - end.len()) / link.len();
                for count in [10, 100, 120, 160, 240, 480, 500, longest, longest + 1] {
                    let template = format!("{start}{}{end}", link.repeat(count));
                    let asked = asks_for(&template);
                    assert!(count < longest || asked.is_err(), "{start}{link}");
                }
            }
        };
        let worker = std::thread::Builder::new().stack_size(2 << 20);
        worker.spawn(parse).unwrap().join().unwrap();
    }
}
