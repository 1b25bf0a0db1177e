//! What runs promise, on a store in memory.

mod any_order;
mod effects;
mod inputs;
pub(crate) mod model;
mod undo;
