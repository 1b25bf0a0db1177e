//! What is to be done after a decision: named steps in sequence, as the configuration or the
//! caller of the API wrote them.
//!
//! A workflow is stored with its run, so that editing it changes nothing for runs that began.
//! Nothing here is rendered yet: payloads become bytes when their step begins, once.

mod check;

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The most steps of a workflow.
pub const STEPS_MAX: usize = 100;
/// The most effects of one step, or of one decision.
pub const EFFECTS_MAX: usize = 1000;
/// The longest name of a workflow, step, signal, queue or destination, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// The name of a decision's own effects: of their step, and of their workflow if that is all.
pub const EFFECTS: &str = "effects";
/// The name of the step that makes the call of an accepted request.
pub const CALL: &str = "call";
/// The longest wait, and the longest time for a signal to come.
pub const WAIT_MAX: Duration = Duration::from_hours(24 * 3650);
/// The longest time that one try may take.
pub const TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// The most faults of an item that are suffered.
pub const FAULTS_MAX: u32 = 1000;
/// Headers that the gateway writes itself: who sends, what, and under which key.
pub const GATEWAY_HEADERS: [&str; 12] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "te",
    "transfer-encoding",
    "upgrade",
    "webhook-id",
    "webhook-signature",
    "webhook-timestamp",
];
/// How much of an effect's answer is kept for later steps, in bytes.
pub const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// How deep a JSON value that is kept with a run may be nested. A reader gives up at 128 levels, and
/// some of these are around the value.
pub const DEPTH_MAX: usize = 64;

/// Whether a value is nested no deeper than [`DEPTH_MAX`].
#[must_use]
pub fn is_shallow(value: &serde_json::Value) -> bool {
    fn within(value: &serde_json::Value, levels: usize) -> bool {
        use serde_json::Value::{Array, Object};
        match value {
            Array(items) => levels > 0 && items.iter().all(|item| within(item, levels - 1)),
            Object(members) => levels > 0 && members.values().all(|item| within(item, levels - 1)),
            _ => true,
        }
    }
    within(value, DEPTH_MAX)
}

/// Steps in sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workflow {
    /// For people: in lists and in the log.
    pub name: String,
    /// At least one; their names are unique.
    pub steps: Vec<Step>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Unique within the workflow; later templates refer to it.
    pub name: String,
    /// What it does.
    pub action: Action,
    /// What follows when it fails for good.
    pub on_failure: OnFailure,
    /// What undoes it, when a later step fails for good or the run is cancelled.
    pub compensation: Option<Effect>,
}

impl Workflow {
    /// A decision's own effects as a first step, and what follows them.
    #[must_use]
    pub fn with_effects(effects: Vec<Effect>, later: Option<&Self>) -> Self {
        let first = Step {
            name: EFFECTS.to_owned(),
            action: Action::Effects(effects),
            on_failure: OnFailure::default(),
            compensation: None,
        };
        let steps = later.map(|later| later.steps.clone()).unwrap_or_default();
        Self {
            name: later.map_or(EFFECTS, |later| &later.name).to_owned(),
            steps: [vec![first], steps].concat(),
        }
    }

    /// Every effect, compensations included.
    pub fn effects(&self) -> impl Iterator<Item = &Effect> {
        self.steps.iter().flat_map(|step| {
            let effects = match &step.action {
                Action::Effects(effects) => &**effects,
                Action::Wait { .. } | Action::Signal { .. } => &[],
            };
            effects.iter().chain(&step.compensation)
        })
    }

    /// The same, to be changed.
    pub fn effects_mut(&mut self) -> impl Iterator<Item = &mut Effect> {
        self.steps.iter_mut().flat_map(|step| {
            let effects = match &mut step.action {
                Action::Effects(effects) => &mut **effects,
                Action::Wait { .. } | Action::Signal { .. } => &mut [],
            };
            effects.iter_mut().chain(&mut step.compensation)
        })
    }

    /// Whether a template holds this word, so that it may ask for the variable of that name.
    #[must_use]
    pub fn mentions(&self, word: &str) -> bool {
        let mut templates = self.effects().flat_map(Effect::templates);
        templates.any(|template| template.contains(word))
    }
}

impl Step {
    /// The signal that it waits for, if it is such a step.
    #[must_use]
    pub fn signal(&self) -> Option<&str> {
        match &self.action {
            Action::Signal { signal, .. } => Some(signal),
            Action::Effects(_) | Action::Wait { .. } => None,
        }
    }
}

impl Effect {
    /// Every template of it.
    pub fn templates(&self) -> impl Iterator<Item = &str> {
        let payload = match &self.payload {
            Payload::Template { template, .. } => Some(&**template),
            _ => None,
        };
        let (texts, headers) = match &self.send {
            Send::Http(http) => (http.path.as_ref(), &*http.headers),
            Send::Publish { subject, .. } => (Some(subject), &[][..]),
            Send::Task { .. } => (None, &[][..]),
        };
        let texts = texts
            .into_iter()
            .chain(headers.iter().map(|(_, value)| value));
        let texts = texts.filter_map(|text| match text {
            Text::Template(template) => Some(&**template),
            Text::Plain(_) => None,
        });
        payload.into_iter().chain(texts)
    }
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Sends these, one after another, and is done when all are.
    Effects(Vec<Effect>),
    /// Waits for this long.
    Wait {
        /// In milliseconds.
        for_ms: u64,
    },
    /// Waits for an external event of this name.
    Signal {
        /// The event's name.
        signal: String,
        /// It fails after this long, in milliseconds; `None`: it waits for ever.
        timeout_ms: Option<u64>,
    },
}

/// What follows when a step fails for good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// The run is `stuck` until an operator acts.
    #[default]
    Stop,
    /// The compensations of the steps before it run in reverse order; the run ends `compensated`,
    /// or `failed` when there were none.
    Compensate,
    /// The run goes on without it.
    Continue,
}

impl OnFailure {
    /// As the configuration and the API write it.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        match word {
            "stop" => Some(Self::Stop),
            "compensate" => Some(Self::Compensate),
            "continue" => Some(Self::Continue),
            _ => None,
        }
    }
}

/// Something to do outside the database.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Where to and how.
    pub send: Send,
    /// What.
    pub payload: Payload,
    /// When to try again, and when to give up.
    pub retry: Retry,
    /// How long one try may take, the answer's body included, in milliseconds.
    pub timeout_ms: u64,
}

/// Where an effect goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Send {
    /// An HTTP request.
    Http(HttpSend),
    /// A message to a NATS `JetStream` subject.
    Publish {
        /// A configured destination.
        destination: String,
        /// The subject.
        subject: Text,
    },
    /// A task that a step worker pulls.
    Task {
        /// Which workers.
        queue: String,
    },
}

/// An HTTP request to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HttpSend {
    /// Where to.
    pub to: Target,
    /// The method.
    pub method: String,
    /// Path and query; `None`: what the destination's URL says.
    pub path: Option<Text>,
    /// More headers. Each character of a value is one byte of it (ISO 8859-1).
    pub headers: Vec<(String, Text)>,
    /// Which answers are success.
    pub success: Success,
    /// How much of the answer's body is kept for later steps, in bytes.
    pub answer_bytes_max: u64,
}

/// A text that is taken as it is, or rendered when its step begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Text {
    /// As it is.
    Plain(String),
    /// `minijinja` over what a [`Payload::Template`] sees.
    Template(String),
}

impl Text {
    /// A template if it looks like one.
    #[must_use]
    pub fn parse(text: String) -> Self {
        if text.contains("{{") || text.contains("{%") {
            Self::Template(text)
        } else {
            Self::Plain(text)
        }
    }

    /// The text, or the template.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Plain(text) | Self::Template(text) => text,
        }
    }

    /// Whether it is rendered when its step begins.
    #[must_use]
    pub fn is_template(&self) -> bool {
        matches!(self, Self::Template(_))
    }
}

/// Where an HTTP request goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// A configured destination.
    Destination(String),
    /// A pool of the gateway.
    Pool(String),
    /// An absolute URL, never one of a private network.
    Url(String),
}

/// Which answers end an HTTP effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Success {
    /// 2xx; any other is a fault.
    Ok,
    /// Every answer below 500 but these: it is what the caller wants to know.
    Answered {
        /// Statuses that are tried again.
        released: Vec<u16>,
    },
}

/// What an effect sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// Nothing.
    Empty,
    /// The body of the decision's answer, unchanged, with its content type.
    Decision,
    /// The body of the request, unchanged, with its content type.
    Request,
    /// This, as JSON.
    Json(serde_json::Value),
    /// What the template renders to.
    Template {
        /// `minijinja` over `decision`, `request` and `steps`.
        template: String,
        /// Of the result.
        content_type: String,
    },
}

/// When a try that failed is followed by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// The first pause, before jitter, in milliseconds; it doubles.
    pub first_ms: u64,
    /// The longest pause, before jitter, in milliseconds.
    pub max_ms: u64,
    /// How long faults of the destination are suffered, from the first try, in milliseconds.
    pub horizon_ms: u64,
    /// How often faults of the item itself are.
    pub faults_max: u32,
}

impl Retry {
    /// Four tries in the first minute at most, then ever fewer, for three days.
    pub const DEFAULT: Self = Self {
        first_ms: 10_000,
        max_ms: 3_600_000,
        horizon_ms: 3 * 24 * 3_600_000,
        faults_max: 5,
    };
    /// The longest horizon: retention must be longer.
    pub const HORIZON_MAX: Duration = Duration::from_hours(24 * 30);
}

impl Default for Retry {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Whether this can be the name of a workflow, step, signal, queue or destination.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(allowed)
}
