//! The client side of the proxy over real sockets.

mod client;
mod framing;
mod limits;
mod passthrough;
mod protocols;
mod server;
mod shutdown;
mod tunnels;
