//! A real `nats-server` with `JetStream`, on a port of its own, with a directory of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;

use async_nats::jetstream::{self, stream};

use super::clock::eventually;
use super::process::{Process, scratch};

/// A server; ends when dropped.
pub struct Nats {
    process: Process,
    port: u16,
    directory: tempfile::TempDir,
}

impl Nats {
    /// Starts one.
    pub async fn start() -> Self {
        let directory = scratch();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let process = spawn(port, &directory);
        let nats = Self {
            process,
            port,
            directory,
        };
        nats.listening().await;
        nats
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it again, with the same port and data.
    pub async fn restart(&mut self) {
        self.kill();
        self.process = spawn(self.port, &self.directory);
        self.listening().await;
    }

    /// Makes a stream for these subjects.
    pub async fn stream(&self, name: &str, subjects: &str) -> stream::Stream {
        let config = stream::Config {
            name: name.to_owned(),
            subjects: vec![subjects.to_owned()],
            ..stream::Config::default()
        };
        let context = self.context().await;
        eventually("the stream is made", async || {
            context.create_stream(config.clone()).await.ok()
        })
        .await
    }

    /// Messages in a stream.
    pub async fn messages(&self, name: &str) -> u64 {
        let context = self.context().await;
        eventually("the stream tells", async || {
            let stream = context.get_stream(name).await.ok()?;
            Some(stream.cached_info().state.messages)
        })
        .await
    }

    async fn context(&self) -> jetstream::Context {
        let client = eventually("a client connects", async || {
            async_nats::connect(self.url()).await.ok()
        })
        .await;
        jetstream::new(client)
    }

    async fn listening(&self) {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        eventually("nats-server listens", async || {
            tokio::net::TcpStream::connect(address).await.ok()
        })
        .await;
    }
}

fn spawn(port: u16, directory: &tempfile::TempDir) -> Process {
    let places = ["/usr/sbin/nats-server", "/usr/bin/nats-server"].map(PathBuf::from);
    let program = places.into_iter().find(|path| path.exists());
    let mut command = Command::new(program.expect("no nats-server; scripts/setup installs it"));
    let port = port.to_string();
    command
        .args(["--addr", "127.0.0.1", "--jetstream", "--port", &port])
        .arg("--store_dir")
        .arg(directory.path());
    Process::spawn(command)
}
