//! An address where connecting hangs, until it is opened and leads to an upstream.
//!
//! The listener's backlog is full, so the kernel drops further attempts without a word.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// A listener that nobody gets through to.
pub struct Blackhole {
    address: SocketAddr,
    listener: Option<TcpListener>,
    fillers: Vec<TcpStream>,
    passages: JoinSet<()>,
}

impl Blackhole {
    /// Listens and fills its own backlog.
    pub async fn new() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        socket.bind(&any.into()).expect("a port");
        socket.listen(0).expect("it listens");
        let listener: TcpListener = socket.into();
        let address = listener.local_addr().expect("an address");
        let mut fillers = Vec::new();
        loop {
            let attempt = TcpStream::connect(address);
            match tokio::time::timeout(Duration::from_millis(200), attempt).await {
                Ok(filler) => fillers.push(filler.expect("it listens")),
                Err(_) => break,
            }
        }
        Self {
            address,
            listener: Some(listener),
            fillers,
            passages: JoinSet::new(),
        }
    }

    /// The target as a pool's configuration names it.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Leads to `target` from now on, hanging attempts included.
    pub fn open(&mut self, target: SocketAddr) {
        self.fillers.clear();
        let listener = self.listener.take().expect("it is opened once");
        listener.set_nonblocking(true).expect("a socket");
        let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
        self.passages.spawn(async move {
            let mut passages = JoinSet::new();
            while let Ok((mut here, _)) = listener.accept().await {
                passages.spawn(async move {
                    if let Ok(mut there) = TcpStream::connect(target).await {
                        let _ended = tokio::io::copy_bidirectional(&mut here, &mut there).await;
                    }
                });
            }
        });
    }
}
