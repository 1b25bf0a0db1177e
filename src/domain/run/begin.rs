//! How a run begins: with the decision that starts it, in its transaction.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use uuid::Uuid;

use super::{NewRun, RunId};
use crate::domain::intent::Stamp;
use crate::domain::message::Recorded;
use crate::domain::record::DecisionId;
use crate::domain::scope::RecordKey;
use crate::domain::workflow::Workflow;

/// The request that a run is about.
#[derive(Clone, Debug, Default)]
pub struct RequestSeen {
    /// Its method.
    pub method: String,
    /// Its path, as it came.
    pub path: String,
    /// Its query, without `?`.
    pub query: Option<String>,
    /// Its content type.
    pub content_type: Option<String>,
    /// Its body.
    pub body: Bytes,
}

/// What a run begins with.
pub struct Beginning<'a> {
    /// What is to be done.
    pub workflow: &'a Workflow,
    /// The decision's id.
    pub run_id: RunId,
    /// The record that was decided.
    pub record: &'a RecordKey,
    /// Only this record and this generation give it: the keys of the effects are made from it.
    pub key_seed: Uuid,
    /// The key of the first intent, if it is not to be made: that of an accepted request. Empty:
    /// the receiver is to see none.
    pub first_key: Option<String>,
    /// Drawn for the first tick.
    pub tick_id: Stamp,
    /// Whether the record is not reclaimable before the run is final.
    pub holds_record: bool,
    /// The request, if one is known.
    pub request: Option<RequestSeen>,
    /// The answer that was decided, if templates are to see it.
    pub decision: Option<&'a Recorded>,
    /// What a caller of the API gave with it.
    pub input: Value,
}

/// What follows from a decision that is not made yet.
#[derive(Clone, Debug)]
pub struct FollowUp {
    /// What is to be done.
    pub workflow: Arc<Workflow>,
    /// The request, if one is known.
    pub request: Option<RequestSeen>,
    /// What a caller of the API gave with it.
    pub input: Value,
    /// The key of the first intent, if it is not to be made; see [`Beginning`].
    pub first_key: Option<String>,
    /// Whether the record is not reclaimable before the run is final.
    pub holds_record: bool,
}

impl FollowUp {
    /// The run that this decision starts. `key_seed`: see [`Beginning`].
    #[must_use]
    pub fn begin(
        &self,
        record: &RecordKey,
        decision_id: DecisionId,
        decision: &Recorded,
        key_seed: Uuid,
        tick_id: Stamp,
    ) -> NewRun {
        begin(&Beginning {
            workflow: &self.workflow,
            run_id: decision_id.into(),
            record,
            key_seed,
            first_key: self.first_key.clone(),
            tick_id,
            holds_record: self.holds_record,
            request: self.request.clone(),
            decision: Some(decision),
            input: self.input.clone(),
        })
    }
}

/// Makes the run. A payload that can't be rendered makes it `stuck`, never an error: the decision
/// is committed all the same.
#[must_use]
pub fn begin(beginning: &Beginning<'_>) -> NewRun {
    super::tick::first(beginning)
}
