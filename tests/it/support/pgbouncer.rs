//! A real PgBouncer in transaction mode, in front of a test's database.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::clock::eventually;
use super::postgres::Database;
use super::process::Process;

/// A running PgBouncer; it ends when dropped.
pub struct PgBouncer {
    address: SocketAddr,
    _process: Process,
    _directory: TempDir,
}

impl PgBouncer {
    /// Starts one with this many connections to the server.
    pub async fn start(database: &Database, connections: u32) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        // Readable for the user that it runs as: PgBouncer refuses root.
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let file = directory.path().join("pgbouncer.ini");
        let server: SocketAddr = database.address().parse().unwrap();
        let (host, port) = (server.ip(), server.port());
        let config = format!(
            "[databases]\n* = host={host} port={port} user=postgres\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = transaction\ndefault_pool_size = {connections}\n\
             max_client_conn = 200\nignore_startup_parameters = extra_float_digits\n",
            address.port()
        );
        fs::write(&file, config).unwrap();
        let process = Process::spawn(command(&file));
        eventually("PgBouncer listens", async || {
            tokio::net::TcpStream::connect(address).await.ok()
        })
        .await;
        Self {
            address,
            _process: process,
            _directory: directory,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn command(file: &Path) -> Command {
    let is_root = rustix::process::geteuid().is_root();
    let mut command = if is_root {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
        command.arg("/usr/sbin/pgbouncer");
        command
    } else {
        Command::new("/usr/sbin/pgbouncer")
    };
    command.arg(file);
    command
}
