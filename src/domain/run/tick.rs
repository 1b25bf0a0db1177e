//! The tick.

use super::begin::Beginning;
use super::{Input, LoadedRun, NewRun, Refused, Tick};

/// What becomes of a run by what it has not taken in yet and by one input, if there is one.
/// `None`: nothing; there is no commit to make.
///
/// # Errors
/// When the input can't be taken; then nothing is to be written.
pub fn tick(_loaded: &LoadedRun, _input: Option<&Input>) -> Result<Option<Tick>, Refused> {
    Ok(None)
}

pub(super) fn first(beginning: &Beginning<'_>) -> NewRun {
    let _ = beginning;
    panic!("not here yet")
}
