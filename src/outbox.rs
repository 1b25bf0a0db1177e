//! HTTP and NATS out: intents on their way to their destinations.

pub mod tasks;
