//! `[[workflow]]` and its steps, and what a route makes of `follow_up` and `[[route.effect]]`.

use std::sync::Arc;

use super::destinations::{self, Timing};
use super::effects::{self, EffectRead, KINDS, Places};
use super::parse::DURATION_MIN;
use super::report::{Origin, Report};
use super::section::Section;
use crate::domain::millis;
use crate::domain::workflow::{Action, Effect, OnFailure, Send, Step, Target, WAIT_MAX, Workflow};

/// A workflow whose times can still be compared.
pub(super) struct WorkflowRead {
    pub(super) origin: Origin,
    pub(super) name: String,
    /// Nothing if something is wrong with it.
    pub(super) workflow: Option<Arc<Workflow>>,
    pub(super) timings: Vec<Timing>,
}

/// All workflows that were read.
pub(super) struct Workflows {
    pub(super) known: Vec<WorkflowRead>,
    /// Whether these are all that were written.
    pub(super) complete: bool,
}

/// Reads every workflow.
pub(super) fn read(top: &mut Section<'_>, places: Places<'_>, report: &mut Report) -> Workflows {
    let mut workflows = Workflows {
        known: Vec::new(),
        complete: true,
    };
    for section in top.tables("workflow") {
        let Some(read) = read_one(section, places, report) else {
            workflows.complete = false;
            continue;
        };
        if let Some(earlier) = workflows.find(&read.name) {
            let (name, at) = (&read.name, &earlier.origin);
            report.error(
                &read.origin,
                format!("workflow \"{name}\" is already at {at}; give each workflow its own name"),
            );
        }
        workflows.known.push(read);
    }
    workflows
}

impl Workflows {
    pub(super) fn find(&self, name: &str) -> Option<&WorkflowRead> {
        self.known.iter().find(|read| read.name == name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(|read| read.name.as_str())
    }

    /// Whether nothing is wrong with any.
    pub(super) fn all_sound(&self) -> bool {
        self.complete && self.known.iter().all(|read| read.workflow.is_some())
    }

    /// Those that nothing is wrong with.
    pub(super) fn sound(&self) -> impl Iterator<Item = &Arc<Workflow>> {
        self.known.iter().filter_map(|read| read.workflow.as_ref())
    }
}

fn read_one(
    mut section: Section<'_>,
    places: Places<'_>,
    report: &mut Report,
) -> Option<WorkflowRead> {
    let form = "a name such as \"after-order\"";
    let name = section.text_required("name", None, form, destinations::name);
    let mut timings = Vec::new();
    let sections = section.tables("step");
    if !section.has("step") {
        section.missing("step", "a [[workflow.step]]");
    }
    let mut steps = Vec::new();
    for step in sections {
        steps.push(read_step(step, places, &mut timings, &mut section.report));
    }
    let origin = section.origin.clone();
    let steps: Option<Vec<Step>> = steps.into_iter().collect();
    let name = name.map(|name| name.value);
    let workflow = steps
        .zip(name.clone())
        .map(|(steps, name)| Workflow { name, steps });
    let workflow = workflow.filter(|workflow| is_sound(&mut section, workflow, &timings));
    report.merge(section.finish());
    Some(WorkflowRead {
        origin,
        name: name?,
        workflow: workflow.map(Arc::new),
        timings,
    })
}

fn read_step(
    mut section: Section<'_>,
    places: Places<'_>,
    timings: &mut Vec<Timing>,
    report: &mut Report,
) -> Option<Step> {
    const ACTIONS: [&str; 7] = [
        KINDS[0], KINDS[1], KINDS[2], KINDS[3], KINDS[4], "wait", "signal",
    ];
    let form = "a name, by which later templates know it";
    let name = section.text_required("name", None, form, destinations::name);
    let on_failure = section.text("on_failure", "stop", on_failure).value;
    let action = match effects::one_of(&mut section, &ACTIONS) {
        Some("wait") => {
            let time = section.duration_if_any("wait", DURATION_MIN..=WAIT_MAX);
            time.map(|time| Action::Wait {
                for_ms: millis(time.value),
            })
        }
        Some("signal") => {
            let signal = section.text_if_any("signal", None, destinations::name);
            let timeout = section.duration_if_any("timeout", DURATION_MIN..=WAIT_MAX);
            signal.map(|signal| Action::Signal {
                signal: signal.value,
                timeout_ms: timeout.map(|timeout| millis(timeout.value)),
            })
        }
        kind => {
            let read = effects::read(&mut section, kind, places);
            keep(read, timings).map(|effect| Action::Effects(vec![effect]))
        }
    };
    let compensation = if section.has("compensation") {
        let inner = section.table("compensation");
        let read = effects::read_whole(inner, places, &mut section.report);
        Some(keep(read, timings))
    } else {
        None
    };
    report.merge(section.finish());
    Some(Step {
        name: name?.value,
        action: action?,
        on_failure,
        compensation: match compensation {
            Some(read) => Some(read?),
            None => None,
        },
    })
}

fn keep(read: EffectRead, timings: &mut Vec<Timing>) -> Option<Effect> {
    timings.push(read.timing);
    read.effect
}

fn on_failure(text: &str) -> Result<OnFailure, String> {
    OnFailure::from_word(text).ok_or_else(|| {
        "is no known word; write \"stop\", \"compensate\" or \"continue\"".to_owned()
    })
}

/// What follows from a route's decisions.
pub(super) struct FollowUpRead {
    pub(super) workflow: Option<Arc<Workflow>>,
    /// Whether anything was written, sound or not.
    pub(super) is_written: bool,
    pub(super) timings: Vec<Timing>,
}

/// Reads `follow_up` and the effects of a route; with both, the effects come first.
pub(super) fn read_follow_up(
    section: &mut Section<'_>,
    places: Places<'_>,
    workflows: &Workflows,
) -> FollowUpRead {
    let is_written = section.has("follow_up") || section.has("effect");
    let named = section.text_if_any("follow_up", None, destinations::name);
    let mut timings = Vec::new();
    let sections = section.tables("effect");
    let reads: Vec<_> = sections
        .into_iter()
        .map(|effect| effects::read_whole(effect, places, &mut section.report))
        .collect();
    let effects: Option<Vec<Effect>> = reads
        .into_iter()
        .map(|read| keep(read, &mut timings))
        .collect();
    let follow_up = named.as_ref().and_then(|name| {
        let found = workflows.find(&name.value);
        if found.is_none() && workflows.complete {
            effects::unknown(section, name, "workflow", &name.value, workflows.names());
        }
        found?.workflow.clone()
    });
    let is_missing = named.is_some() && follow_up.is_none();
    let workflow = match (effects, follow_up) {
        (None, _) => None,
        (Some(_), None) if is_missing => None,
        (Some(effects), follow_up) if effects.is_empty() => follow_up,
        (Some(effects), follow_up) => {
            let workflow = Workflow::with_effects(effects, follow_up.as_deref());
            is_sound(section, &workflow, &timings).then(|| Arc::new(workflow))
        }
    };
    FollowUpRead {
        workflow,
        is_written,
        timings,
    }
}

/// Whether a workflow as a whole is right; notes what is not, its templates included.
fn is_sound(section: &mut Section<'_>, workflow: &Workflow, timings: &[Timing]) -> bool {
    // Pauses that don't grow are told with both values, as a contradiction.
    if timings
        .iter()
        .any(|timing| timing.retry.first.value > timing.retry.max.value)
    {
        return false;
    }
    let wrong = workflow.check().err().unwrap_or_default();
    for problem in &wrong {
        section.wrong(&format!("is wrong: {problem}"));
    }
    wrong.is_empty()
}

/// How a workflow's effects are sent.
pub(super) fn sends(workflow: &Workflow) -> impl Iterator<Item = &Send> {
    workflow.effects().map(|effect| &effect.send)
}

/// The destination that an effect needs, if it is a configured one.
pub(super) fn destination_of(send: &Send) -> Option<&str> {
    match send {
        Send::Http(http) => match &http.to {
            Target::Destination(id) => Some(id),
            Target::Pool(_) | Target::Url(_) => None,
        },
        Send::Publish { destination, .. } => Some(destination),
        Send::Task { .. } => None,
    }
}

/// The pool that an effect needs.
pub(super) fn pool_of(send: &Send) -> Option<&str> {
    match send {
        Send::Http(http) => match &http.to {
            Target::Pool(id) => Some(id),
            Target::Destination(_) | Target::Url(_) => None,
        },
        Send::Publish { .. } | Send::Task { .. } => None,
    }
}
