//! The outbox on real stores, to scripted destinations over real sockets.

mod answers;
mod breakers;
mod double;
mod ends;
mod fairness;
mod fixture;
mod nats;
mod private;
mod signatures;
mod tasks;
