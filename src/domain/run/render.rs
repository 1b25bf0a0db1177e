//! Templates become text: bounded in work and in size, and once only.
//!
//! What an error says comes from the template alone: never a value that it was given.

use std::io::{self, Write};

use minijinja::value::{Serde, ValueKind};
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value,
    escape_formatter,
};

/// The longest text that a template may render to, in bytes.
pub const RENDERED_BYTES_MAX: usize = 8 * 1024 * 1024;
/// What one rendering may take: an instruction, or 64 bytes that are made or written, cost one.
const FUEL: u64 = 500_000;
/// The most of a template's own text that an error repeats, in bytes.
const QUOTED_BYTES_MAX: usize = 100;

/// Templates with what they see.
pub(super) struct Renderer {
    environment: Environment<'static>,
    context: Value,
}

impl Renderer {
    pub fn new(context: &serde_json::Map<String, serde_json::Value>) -> Self {
        Self {
            environment: environment(),
            context: Value::from(Serde(context)),
        }
    }

    /// # Errors
    /// A sentence about what is wrong with the template.
    pub fn render(&self, template: &str) -> Result<String, String> {
        let compiled = self.environment.template_from_str(template);
        let compiled = compiled.map_err(|error| told(&error, template))?;
        let mut written = Bounded(Vec::new());
        compiled
            .render_captured_to(self.context.clone(), &mut written)
            .map_err(|error| told(&error, template))?;
        String::from_utf8(written.0).map_err(|_| "it renders to what is no text".to_owned())
    }
}

/// Whether a template can be compiled.
///
/// # Errors
/// A sentence about what is wrong with it.
pub(in crate::domain) fn compile(template: &str) -> Result<(), String> {
    let environment = environment();
    let compiled = environment.template_from_str(template);
    compiled.map(drop).map_err(|error| told(&error, template))
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(write);
    environment.set_fuel(Some(FUEL));
    // Only so that errors know their place; what they know else is never shown.
    environment.set_debug(true);
    environment
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

fn told(error: &Error, template: &str) -> String {
    let what = match error.kind() {
        ErrorKind::WriteFailure => format!("it renders to more than {RENDERED_BYTES_MAX} bytes"),
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

/// Takes up to [`RENDERED_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > RENDERED_BYTES_MAX {
            return Err(io::Error::other("too long"));
        }
        self.0.extend_from_slice(bytes);
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
        Renderer::new(context.as_object().unwrap()).render(template)
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
        assert!(compile("{{ input").is_err());
        assert!(compile("{% if a %}").unwrap_err().contains("line 1"));
        assert!(compile("plain").is_ok());
    }
}
