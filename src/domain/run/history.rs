//! The words of a run's history, each with what it says.

/// The run began, with its decision.
pub const STARTED: &str = "started";
/// A step began; its effects, if it has any, are frozen.
pub const STEP_STARTED: &str = "step_started";
/// An effect was delivered.
pub const EFFECT_DELIVERED: &str = "effect_delivered";
/// The run went on without an effect or a step.
pub const SKIPPED: &str = "skipped";
/// A step is done.
pub const STEP_COMPLETED: &str = "step_completed";
/// A step failed for good.
pub const STEP_FAILED: &str = "step_failed";
/// The run can't go on by itself.
pub const STUCK: &str = "stuck";
/// The time of a timer is over.
pub const TIMER_OVER: &str = "timer_over";
/// A signal came.
pub const SIGNAL_RECEIVED: &str = "signal_received";
/// A step took a signal.
pub const SIGNAL_CONSUMED: &str = "signal_consumed";
/// Somebody cancelled the run.
pub const CANCEL_REQUESTED: &str = "cancel_requested";
/// Somebody had the run try again what it is stuck at.
pub const RETRIED: &str = "retried";
/// Somebody had the run go on without what it is stuck at.
pub const RESUMED: &str = "resumed";
/// What was done is being undone from here on.
pub const UNDOING: &str = "undoing";
/// Effects that the run did not want any more are out of the way.
pub const WITHDRAWN: &str = "withdrawn";
/// The compensation of a step began.
pub const UNDO_STARTED: &str = "undo_started";
/// The compensation of a step was delivered.
pub const UNDONE: &str = "undone";
/// Effects changed that the run had gone on without.
pub const NOTED: &str = "noted";
/// The run ended: every step is done.
pub const COMPLETED: &str = "completed";
/// The run ended: a step failed for good, and there was nothing to undo.
pub const FAILED: &str = "failed";
/// The run ended: a step failed for good, and what was done before is undone.
pub const COMPENSATED: &str = "compensated";
/// The run ended: it was cancelled, and what was done before is undone.
pub const CANCELLED: &str = "cancelled";

/// Every kind of transition, with a sentence that says what happened.
pub const KINDS: [(&str, &str); 22] = [
    (STARTED, "The run began, with its decision."),
    (STEP_STARTED, "A step began; its effects are frozen."),
    (EFFECT_DELIVERED, "An effect was delivered."),
    (SKIPPED, "The run went on without an effect or a step."),
    (STEP_COMPLETED, "A step is done."),
    (STEP_FAILED, "A step failed for good."),
    (STUCK, "The run can't go on by itself."),
    (TIMER_OVER, "The time of a timer is over."),
    (SIGNAL_RECEIVED, "A signal came."),
    (SIGNAL_CONSUMED, "A step took a signal."),
    (CANCEL_REQUESTED, "Somebody cancelled the run."),
    (RETRIED, "Somebody had it try again what it is stuck at."),
    (
        RESUMED,
        "Somebody had it go on without what it is stuck at.",
    ),
    (UNDOING, "What was done is being undone from here on."),
    (
        WITHDRAWN,
        "Effects that are not wanted any more are out of the way.",
    ),
    (UNDO_STARTED, "The compensation of a step began."),
    (UNDONE, "The compensation of a step was delivered."),
    (NOTED, "Effects changed that the run had gone on without."),
    (COMPLETED, "The run ended: every step is done."),
    (
        FAILED,
        "The run ended: a step failed, and there was nothing to undo.",
    ),
    (
        COMPENSATED,
        "The run ended: a step failed, and what was done is undone.",
    ),
    (
        CANCELLED,
        "The run ended: it was cancelled, and what was done is undone.",
    ),
];
