//! The brain for runs: load, tick, commit, wake.
//!
//! [`Coordinator`] is the only way in which a run changes. It knows no SQL and no HTTP; what a run
//! is to become is decided by [`domain::run`](crate::domain::run).

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::domain::run::{Input, Refused, Run, RunKey};
use crate::store::StoreError;

/// The only way in which a run changes. Clones are the same.
#[derive(Clone)]
pub struct Coordinator {
    changes: broadcast::Sender<RunKey>,
}

/// What an input did.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The run as it is then.
    pub run: Run,
    /// Whether it had been applied before, so that nothing was written.
    pub repeated: bool,
}

/// Why an input did nothing.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// There is no such run.
    #[error("there is no such run")]
    NoRun,
    /// The run does not take it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Others changed the run again and again.
    #[error("others keep changing the run")]
    Contended,
    /// The store gave no answer.
    #[error(transparent)]
    Store(Arc<StoreError>),
}

impl Default for Coordinator {
    fn default() -> Self {
        Self {
            changes: broadcast::Sender::new(1),
        }
    }
}

impl Coordinator {
    /// Applies one input.
    ///
    /// # Errors
    /// When it was not applied, or may not have been.
    pub async fn apply(&self, _key: &RunKey, _input: Input) -> Result<Applied, ApplyError> {
        std::future::ready(Err(ApplyError::Contended)).await
    }

    /// Hints that these runs changed, by this gateway.
    pub fn watch(&self) -> broadcast::Receiver<RunKey> {
        self.changes.subscribe()
    }
}
