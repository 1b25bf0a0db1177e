//! What is wrong with a workflow, all of it at once, each as what to write instead.

use std::collections::BTreeSet;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::{
    Action, CALL, DEPTH_MAX, EFFECTS, EFFECTS_MAX, Effect, HttpSend, NAME_BYTES_MAX, Payload,
    Retry, STEPS_MAX, Send, Step, TIMEOUT_MAX, Target, Text, WAIT_MAX, Workflow, is_name,
    is_shallow,
};
use crate::domain::run::{freeze, render};

/// What templates see.
const KNOWN: [&str; 9] = [
    "input", "decision", "request", "steps", "signals", "tenant", "pool", "key", "run_id",
];

impl Workflow {
    /// Whether it can be run.
    ///
    /// # Errors
    /// Everything that is wrong with it, each with its place and what to write.
    pub fn check(&self) -> Result<(), Vec<String>> {
        let signals = self.steps.iter().filter_map(Step::signal);
        let mut wrong = Wrong {
            found: Vec::new(),
            signals: signals.map(str::to_owned).collect(),
        };
        wrong.name("the workflow's name", &self.name);
        if !(1..=STEPS_MAX).contains(&self.steps.len()) {
            wrong.tell(format!(
                "workflow `{}`: write 1 to {STEPS_MAX} steps",
                self.name
            ));
        }
        let mut names = BTreeSet::new();
        for step in &self.steps {
            wrong.name("a step's name", &step.name);
            if names.contains(&step.name) {
                let name = &step.name;
                wrong.tell(format!(
                    "two steps have the name `{name}`; give each its own"
                ));
            }
            wrong.step(step, &names);
            names.insert(&step.name);
        }
        if wrong.found.is_empty() {
            Ok(())
        } else {
            Err(wrong.found)
        }
    }
}

/// The names of the steps before an effect's own; `None` for a compensation, which sees all.
type Earlier<'a> = Option<&'a BTreeSet<&'a String>>;

/// What was found.
struct Wrong {
    found: Vec<String>,
    /// Every signal that a step awaits.
    signals: BTreeSet<String>,
}

impl Wrong {
    fn tell(&mut self, sentence: String) {
        self.found.push(sentence);
    }

    fn check(&mut self, holds: bool, place: &str, what: &str) {
        if !holds {
            self.tell(format!("{place}: {what}"));
        }
    }

    fn take(&mut self, place: &str, checked: Result<(), String>) {
        if let Err(what) = checked {
            self.tell(format!("{place}: {what}"));
        }
    }

    fn name(&mut self, what: &str, name: &str) {
        if !is_name(name) {
            self.tell(format!(
                "{what} must be 1 to {NAME_BYTES_MAX} characters of a-z, A-Z, 0-9, `-`, `_` and `.`"
            ));
        }
    }

    fn step(&mut self, step: &Step, names: &BTreeSet<&String>) {
        let place = format!("step `{}`", step.name);
        let days = WAIT_MAX.as_secs() / (24 * 3600);
        let time = format!("write a time above zero and up to {days} days");
        match &step.action {
            Action::Effects(effects) => {
                let count = (1..=EFFECTS_MAX).contains(&effects.len());
                self.check(count, &place, &format!("write 1 to {EFFECTS_MAX} effects"));
                for (number, effect) in (1..).zip(effects) {
                    let place = match effects.len() {
                        1 => place.clone(),
                        _ => format!("{place}, effect {number}"),
                    };
                    self.effect(&place, effect, Some(names));
                }
            }
            Action::Wait { for_ms } => {
                self.check(
                    is_within(*for_ms, WAIT_MAX),
                    &place,
                    &format!("`wait`: {time}"),
                );
            }
            Action::Signal { signal, timeout_ms } => {
                self.name(&format!("{place}: the signal's name"), signal);
                let fits = timeout_ms.is_none_or(|ms| is_within(ms, WAIT_MAX));
                self.check(fits, &place, &format!("`timeout`: {time}"));
            }
        }
        if let Some(compensation) = &step.compensation {
            self.effect(&format!("{place}, compensation"), compensation, None);
        }
    }

    fn effect(&mut self, place: &str, effect: &Effect, earlier: Earlier<'_>) {
        let hours = TIMEOUT_MAX.as_secs() / 3600;
        let timeout = format!("`timeout`: write a time above zero and up to {hours} hours");
        self.check(is_within(effect.timeout_ms, TIMEOUT_MAX), place, &timeout);
        self.retry(place, &effect.retry);
        match &effect.send {
            Send::Http(http) => self.http(place, http),
            Send::Publish {
                destination,
                subject,
            } => {
                self.name(&format!("{place}: the destination"), destination);
                if let Text::Plain(subject) = subject {
                    self.take(place, freeze::check_subject(subject));
                }
            }
            Send::Task { queue } => self.name(&format!("{place}: the queue"), queue),
        }
        if let Payload::Template { content_type, .. } = &effect.payload {
            let fits = !content_type.is_empty() && HeaderValue::from_str(content_type).is_ok();
            let what = "`content_type`: write one such as \"application/json\"";
            self.check(fits, place, what);
        }
        if let Payload::Json(value) = &effect.payload {
            let what = format!("`payload` is nested deeper than {DEPTH_MAX} levels");
            self.check(is_shallow(value), place, &what);
        }
        for template in effect.templates() {
            self.template(place, template, earlier);
        }
    }

    /// Whether there will be what a template asks for.
    fn template(&mut self, place: &str, template: &str, earlier: Earlier<'_>) {
        let asked = match render::asks_for(template) {
            Ok(asked) => asked,
            Err(why) => return self.tell(format!("{place}: a template can't be read: {why}")),
        };
        for name in asked {
            let mut parts = name.split('.');
            let root = parts.next().unwrap_or_default();
            if !KNOWN.contains(&root) {
                let known = KNOWN.join("`, `");
                self.tell(format!(
                    "{place}: a template asks for `{root}`, which is not there; it sees `{known}`"
                ));
            }
            let part = parts.next();
            if let Some(signal) = part.filter(|_| root == "signals") {
                let what = format!("a template asks for `signals.{signal}`, and no step awaits it");
                self.check(self.signals.contains(signal), place, &what);
            }
            let step = part.filter(|_| root == "steps");
            let Some((step, earlier)) = step.zip(earlier) else {
                continue;
            };
            // A workflow is checked alone, and what a route does before it has these names.
            let there = [CALL, EFFECTS].contains(&step) || earlier.iter().any(|own| *own == step);
            let what = format!("a template asks for `steps.{step}`, which is no earlier step");
            self.check(there, place, &what);
        }
    }

    fn retry(&mut self, place: &str, retry: &Retry) {
        let rising = retry.first_ms > 0 && retry.max_ms >= retry.first_ms;
        let what = "`retry`: write a `first` above zero and a `max` that is not below it";
        self.check(rising, place, what);
        let days = Retry::HORIZON_MAX.as_secs() / (24 * 3600);
        let horizon = is_within(retry.horizon_ms, Retry::HORIZON_MAX);
        let what = format!("`retry`: write a `horizon` above zero and up to {days} days");
        self.check(horizon, place, &what);
        let what = "`retry`: write `faults = 1` or more";
        self.check(retry.faults_max > 0, place, what);
    }

    fn http(&mut self, place: &str, http: &HttpSend) {
        match &http.to {
            Target::Destination(id) => self.name(&format!("{place}: the destination"), id),
            Target::Pool(id) => self.name(&format!("{place}: the pool"), id),
            Target::Url(url) => {
                let checked = freeze::origin(url).map(drop);
                self.take(place, checked.map_err(|what| format!("`url`: {what}")));
            }
        }
        let what = "`method`: write one such as \"POST\"";
        self.check(freeze::is_method(&http.method), place, what);
        if let Some(Text::Plain(path)) = &http.path {
            self.take(place, freeze::check_path(path));
        }
        for (name, value) in &http.headers {
            let parsed = HeaderName::from_bytes(name.as_bytes());
            let free = parsed.is_ok_and(|name| !freeze::is_reserved_header(&name));
            let what = format!(
                "header `{}` can't be set; leave it out",
                name.escape_debug()
            );
            self.check(free, place, &what);
            if let Text::Plain(value) = value {
                self.take(place, freeze::check_header_value(name, value));
            }
        }
    }
}

fn is_within(ms: u64, longest: Duration) -> bool {
    ms > 0 && Duration::from_millis(ms) <= longest
}

#[cfg(test)]
mod tests {
    use super::super::{OnFailure, Success};
    use super::*;

    fn effect() -> Effect {
        Effect {
            send: Send::Http(HttpSend {
                to: Target::Url("https://example.com/hook".to_owned()),
                method: "POST".to_owned(),
                path: Some(Text::Template("/orders/{{ input.id }}".to_owned())),
                headers: vec![("x-a".to_owned(), Text::Plain("b".to_owned()))],
                success: Success::Ok,
                answer_bytes_max: 1024,
            }),
            payload: Payload::Decision,
            retry: Retry::DEFAULT,
            timeout_ms: 10_000,
        }
    }

    fn workflow(steps: Vec<Step>) -> Workflow {
        Workflow {
            name: "order".to_owned(),
            steps,
        }
    }

    fn step(name: &str, action: Action) -> Step {
        Step {
            name: name.to_owned(),
            action,
            on_failure: OnFailure::Stop,
            compensation: None,
        }
    }

    #[test]
    fn a_sound_workflow_passes() {
        let steps = vec![
            step("charge", Action::Effects(vec![effect(), effect()])),
            step("pause", Action::Wait { for_ms: 1 }),
        ];
        assert_eq!(workflow(steps).check(), Ok(()));
    }

    #[test]
    fn everything_wrong_is_told_at_once_with_its_place() {
        let mut bad = effect();
        bad.timeout_ms = 0;
        bad.retry.faults_max = 0;
        bad.payload = Payload::Template {
            template: "{{ a".to_owned(),
            content_type: "a\nb".to_owned(),
        };
        bad.send = Send::Http(HttpSend {
            to: Target::Url("ftp://a/b".to_owned()),
            method: "CONNECT".to_owned(),
            path: Some(Text::Plain("//b".to_owned())),
            headers: vec![
                ("Idempotency-Key".to_owned(), Text::Plain("k".to_owned())),
                ("x-b".to_owned(), Text::Plain("a\r\nb".to_owned())),
            ],
            success: Success::Ok,
            answer_bytes_max: 1024,
        });
        let mut undo = step("x y", Action::Wait { for_ms: 0 });
        undo.compensation = Some(bad);
        let empty = step("a", Action::Effects(Vec::new()));
        let signal = Action::Signal {
            signal: String::new(),
            timeout_ms: Some(0),
        };
        let steps = vec![undo, empty, step("a", signal)];
        let wrong = workflow(steps).check().unwrap_err();
        insta::assert_snapshot!(wrong.join("\n"));
    }

    fn asks(template: &str) -> Action {
        let mut effect = effect();
        effect.payload = Payload::Template {
            template: template.to_owned(),
            content_type: "text/plain".to_owned(),
        };
        Action::Effects(vec![effect])
    }

    #[test]
    fn what_no_template_will_see_is_told_before_anything_runs() {
        let mut first = step("one", asks("{{ steps.two.body }} {{ steps.one }}"));
        first.compensation = Some(effect());
        let late = asks("{{ steps.one.body.id }} {{ signals.go }} {{ range(3) }} {{ steps.call }}");
        let signal = Action::Signal {
            signal: "go".to_owned(),
            timeout_ms: None,
        };
        let wrong = workflow(vec![
            first,
            step("two", late),
            step("approval", signal),
            step("three", asks("{{ oder }} {{ signals.goo }}")),
        ]);
        let wrong = wrong.check().unwrap_err();
        let told = [
            "step `one`: a template asks for `steps.one`, which is no earlier step",
            "step `one`: a template asks for `steps.two`, which is no earlier step",
            "step `three`: a template asks for `oder`, which is not there; it sees `input`, \
             `decision`, `request`, `steps`, `signals`, `tenant`, `pool`, `key`, `run_id`",
            "step `three`: a template asks for `signals.goo`, and no step awaits it",
        ];
        assert_eq!(wrong, told);
        let mut undone = step("one", asks("fixed"));
        undone.compensation = match asks("{{ steps.two.body }}") {
            Action::Effects(mut effects) => effects.pop(),
            _ => None,
        };
        let sound = workflow(vec![undone, step("two", asks("{{ decision.status }}"))]);
        assert_eq!(sound.check(), Ok(()));
    }

    #[test]
    fn a_payload_may_be_nested_so_deep_and_no_deeper() {
        let nested = |levels: usize| {
            let text = "[".repeat(levels) + &"]".repeat(levels);
            let mut effect = effect();
            effect.payload = Payload::Json(serde_json::from_str(&text).unwrap());
            workflow(vec![step("a", Action::Effects(vec![effect]))]).check()
        };
        assert_eq!(nested(DEPTH_MAX), Ok(()));
        let wrong = nested(DEPTH_MAX + 1).unwrap_err();
        assert!(wrong[0].contains("nested deeper than 64"), "{wrong:?}");
    }

    #[test]
    fn subjects_are_tokens_of_visible_ascii_and_methods_have_no_small_letters() {
        assert_eq!(freeze::check_subject("orders.created"), Ok(()));
        for subject in ["", "a..b", "a b", "a.*", "a.>", "gr\u{f6}\u{df}e"] {
            assert!(freeze::check_subject(subject).is_err(), "{subject}");
        }
        assert!(freeze::is_method("PURGE"));
        for method in ["", "post", "Post", "CONNECT", "TRACE", "A B"] {
            assert!(!freeze::is_method(method), "{method}");
        }
    }

    #[test]
    fn no_steps_and_too_many_are_refused() {
        assert!(workflow(Vec::new()).check().is_err());
        let steps = (0..=STEPS_MAX).map(|n| step(&format!("s{n}"), Action::Wait { for_ms: 1 }));
        let wrong = workflow(steps.collect()).check().unwrap_err();
        assert_eq!(wrong, ["workflow `order`: write 1 to 100 steps"]);
    }
}
