//! Workflows and effects in the words that callers of the API use: the same as in the
//! configuration.
//!
//! [`Catalog`] reads them and knows what they may refer to, so that nothing unknown is committed.
//! Every refusal names its place, such as `run.steps[2].retry.first`.

mod fields;
mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::http::HeaderName;
use serde_json::Value;

use self::fields::{Fields, checked_name, items, unknown};
pub(super) use self::read::header_lines;
use super::request::shallow;
use crate::config::{Config, DestinationKind, TenantSource};
use crate::domain::millis;
use crate::domain::policy::{Mode, Policy};
use crate::domain::scope::{PoolId, TenantScope};
use crate::domain::workflow::{
    Action, EFFECTS_MAX, Effect, OnFailure, Retry, STEPS_MAX, Send, Step, Target, Text, WAIT_MAX,
    Workflow,
};

/// What a step may be, by the key that says so.
const ACTIONS: [&str; 8] = [
    "http", "pool", "url", "publish", "task", "effects", "wait", "signal",
];

/// What effects and runs may refer to.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    destinations: BTreeMap<String, Known>,
    pools: BTreeSet<String>,
    workflows: BTreeMap<String, Arc<Workflow>>,
    /// What follows decisions, by pool, as its routes say; each way once.
    follow_ups: BTreeMap<PoolId, Vec<Option<Arc<Workflow>>>>,
    allow_urls: bool,
    /// The header in which a pool is told whose a request is.
    tenant_header: Option<HeaderName>,
}

/// A destination, as far as an effect needs to know it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    is_http: bool,
    times: Times,
}

/// When a try ends, and when another follows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    timeout_ms: u64,
    retry: Retry,
}

impl Times {
    const DEFAULT: Self = Self {
        timeout_ms: 30_000,
        retry: Retry::DEFAULT,
    };
}

impl Catalog {
    /// What this configuration knows.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let destinations = config.destinations.iter().map(|destination| {
            let timeout_ms = millis(destination.timeout);
            let known = Known {
                is_http: matches!(destination.kind, DestinationKind::Http { .. }),
                times: Times {
                    timeout_ms,
                    retry: destination.retry,
                },
            };
            (destination.id.0.clone(), known)
        });
        let workflows = config.workflows.iter();
        let mut follow_ups: BTreeMap<PoolId, Vec<_>> = BTreeMap::new();
        for policy in config.routes.iter().map(|route| &*route.policy) {
            note_follow_up(&mut follow_ups, policy);
        }
        Self {
            destinations: destinations.collect(),
            pools: config
                .pools
                .iter()
                .map(|pool| pool.id.as_str().to_owned())
                .collect(),
            workflows: workflows
                .map(|workflow| (workflow.name.clone(), Arc::clone(workflow)))
                .collect(),
            follow_ups,
            allow_urls: config.outbox.allow_urls,
            tenant_header: match &config.tenant.source {
                TenantSource::Header(name) => Some(name.clone()),
                TenantSource::Fixed(_) | TenantSource::Credential => None,
            },
        }
    }

    /// What follows a decision of this tenant with these `effects` and this `run`; `None`: nothing.
    pub fn read(
        &self,
        effects: Option<Value>,
        run: Option<Value>,
        tenant: &TenantScope,
    ) -> Result<Option<Arc<Workflow>>, String> {
        let mut effects = match effects {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(none)) if none.is_empty() => Vec::new(),
            Some(list) => self.effects(list, "effects")?,
        };
        for effect in &mut effects {
            self.tell_tenant(effect, tenant);
        }
        let run = match run {
            None | Some(Value::Null) => None,
            Some(run) => Some(self.run(run, tenant)?),
        };
        match (effects.is_empty(), run) {
            (true, run) => Ok(run),
            (false, run) => {
                let workflow = sound(Workflow::with_effects(effects, run.as_deref()))?;
                Ok(Some(Arc::new(workflow)))
            }
        }
    }

    /// Whether there is such a pool.
    pub fn has_pool(&self, pool: &PoolId) -> Result<(), String> {
        let ids = || self.pools.iter().map(String::as_str);
        let is_known = self.pools.contains(pool.as_str());
        is_known
            .then_some(())
            .ok_or_else(|| unknown("pool", "pool", pool.as_str(), ids()))
    }

    /// What the routes of a pool let follow a decision; an error, if they don't agree: the names
    /// of the workflows that there are.
    pub fn follow_up_of(&self, pool: &PoolId) -> Result<Option<Arc<Workflow>>, Vec<String>> {
        let ways = self.follow_ups.get(pool).map_or(&[][..], Vec::as_slice);
        match ways {
            [] => Ok(None),
            [one] => Ok(one.clone()),
            several => {
                let named = several.iter().flatten();
                Err(named.map(|workflow| workflow.name.clone()).collect())
            }
        }
    }

    /// `{ "workflow": NAME }`, or a workflow of its own.
    fn run(&self, run: Value, tenant: &TenantScope) -> Result<Arc<Workflow>, String> {
        let mut fields = Fields::new(run, "run")?;
        if fields.has("workflow") {
            let name = fields.required("workflow")?;
            fields.finish()?;
            let found = self.workflows.get(&name);
            let names = || self.workflows.keys().map(String::as_str);
            return found
                .cloned()
                .ok_or_else(|| unknown("run.workflow", "workflow", &name, names()));
        }
        let mut own = self.workflow(fields)?;
        for effect in own.effects_mut() {
            self.tell_tenant(effect, tenant);
        }
        Ok(Arc::new(own))
    }

    /// A pool trusts what stands in the tenant's header: it is the gateway that writes it.
    fn tell_tenant(&self, effect: &mut Effect, tenant: &TenantScope) {
        if let (Some(name), Send::Http(http)) = (&self.tenant_header, &mut effect.send)
            && matches!(http.to, Target::Pool(_))
        {
            let value = Text::Plain(tenant.tenant().to_owned());
            http.headers.push((name.to_string(), value));
        }
    }

    fn workflow(&self, mut fields: Fields) -> Result<Workflow, String> {
        let name = fields.required("name")?;
        checked_name(&fields.place("name"), &name)?;
        let steps = fields.take("steps").ok_or_else(|| {
            format!(
                "{}: write `steps`, or `workflow` with the name of a configured one",
                fields.at
            )
        })?;
        let at = fields.place("steps");
        fields.finish()?;
        let steps = items(steps, &at, STEPS_MAX)?;
        let steps = steps
            .into_iter()
            .map(|(step, at)| self.step(step, &at))
            .collect::<Result<Vec<_>, _>>()?;
        sound(Workflow { name, steps })
    }

    fn step(&self, step: Value, at: &str) -> Result<Step, String> {
        let mut fields = Fields::new(step, at)?;
        let name = fields.required("name")?;
        checked_name(&fields.place("name"), &name)?;
        let on_failure = match fields.text("on_failure")? {
            None => OnFailure::default(),
            Some(word) => OnFailure::from_word(&word)
                .ok_or_else(|| fields.wrong("on_failure", "stop, compensate or continue"))?,
        };
        let compensation = fields.take("compensation");
        let place = fields.place("compensation");
        let compensation = match compensation {
            Some(effect) => Some(self.effect(effect, &place)?),
            None => None,
        };
        let action = match fields.one_of(&ACTIONS)? {
            "wait" => Action::Wait {
                for_ms: fields.required_duration("wait", WAIT_MAX)?,
            },
            "signal" => {
                let signal = fields.required("signal")?;
                checked_name(&fields.place("signal"), &signal)?;
                Action::Signal {
                    signal,
                    timeout_ms: fields.duration("timeout", WAIT_MAX)?,
                }
            }
            "effects" => {
                let place = fields.place("effects");
                let effects = fields.take("effects").unwrap_or_default();
                Action::Effects(self.effects(effects, &place)?)
            }
            kind => Action::Effects(vec![self.effect_of(&mut fields, kind)?]),
        };
        fields.finish()?;
        Ok(Step {
            name,
            action,
            on_failure,
            compensation,
        })
    }

    fn effects(&self, list: Value, at: &str) -> Result<Vec<Effect>, String> {
        let items = items(list, at, EFFECTS_MAX)?;
        let effects = items.into_iter();
        effects
            .map(|(effect, at)| self.effect(effect, &at))
            .collect()
    }
}

/// What templates see as `input`.
pub(super) fn input(given: Option<Value>) -> Result<Value, String> {
    let input = given.unwrap_or_default();
    shallow("input", &input)?;
    Ok(input)
}

/// Whether it can be run, its templates included.
fn sound(workflow: Workflow) -> Result<Workflow, String> {
    match workflow.check() {
        Ok(()) => Ok(workflow),
        Err(wrong) => Err(wrong.join("; ")),
    }
}

/// Accepted requests are decided before anything is called: what they let follow is no matter of
/// an outcome that nobody knows.
fn note_follow_up(follow_ups: &mut BTreeMap<PoolId, Vec<Option<Arc<Workflow>>>>, policy: &Policy) {
    if policy.mode == Mode::Accept {
        return;
    }
    let ways = follow_ups.entry(policy.pool.clone()).or_default();
    if !ways.contains(&policy.follow_up) {
        ways.push(policy.follow_up.clone());
    }
}

#[cfg(test)]
mod tests;
