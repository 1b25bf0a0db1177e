//! Tasks for step workers.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::domain::intent::{ClaimedIntent, Finished, IntentKey, Stamp};
use crate::domain::scope::TenantScope;
use crate::store::StoreError;

/// Tasks, for step workers. Clones are the same.
#[derive(Clone, Default)]
pub struct Tasks {}

/// What a worker says of a task.
#[derive(Clone, Debug)]
pub enum TaskResult {
    /// Done.
    Done(Value),
    /// Not done.
    Failed {
        /// Whether another try may help.
        retryable: bool,
        /// What happened.
        error: String,
    },
}

impl Tasks {
    /// Claims up to `limit` tasks of a queue.
    ///
    /// # Errors
    /// When the store gives no answer.
    pub async fn claim(
        &self,
        _tenant: Option<&TenantScope>,
        _queue: &str,
        _limit: u32,
        _lease: Duration,
        _worker: &str,
    ) -> Result<Vec<ClaimedIntent>, Arc<StoreError>> {
        std::future::ready(Ok(Vec::new())).await
    }

    /// Extends a claim. `false`: another has it, or nobody.
    ///
    /// # Errors
    /// When the store gives no answer.
    pub async fn heartbeat(
        &self,
        _key: &IntentKey,
        _stamp: Stamp,
        _lease: Duration,
    ) -> Result<bool, Arc<StoreError>> {
        std::future::ready(Ok(false)).await
    }

    /// Takes a result.
    ///
    /// # Errors
    /// When the store gives no answer.
    pub async fn finish(
        &self,
        _key: &IntentKey,
        _stamp: Stamp,
        _result: TaskResult,
    ) -> Result<Finished, Arc<StoreError>> {
        std::future::ready(Ok(Finished::Stale)).await
    }
}
