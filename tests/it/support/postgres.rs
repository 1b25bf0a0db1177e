//! A real PostgreSQL for tests: one throw-away server for a run, a database of its own for each
//! test.
//!
//! The first test that asks starts the server; `watchdog.sh` ends it when the last process that
//! uses it is gone, killed or not. Under cargo-nextest, where each test is a process, they share
//! one server by the run's id. With `ONCEGATE_TEST_POSTGRES=postgres://…/postgres` tests use that
//! server instead, and start none.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate::config::StoreConfig;
use oncegate::store::migrate;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection as _};
use tokio::sync::OnceCell;

/// A database with this program's schema, to copy.
const TEMPLATE: &str = "oncegate_template";
/// How long a server without users lives under cargo-nextest: until the next test asks.
const GRACE_SECONDS: u32 = 5;

/// A server.
pub struct Server {
    /// The URL of its database `postgres`.
    admin: String,
    /// Whether it has the template.
    has_template: bool,
    /// Ours to stop and start; `None` for one that was there.
    ours: Option<Ours>,
}

struct Ours {
    data: PathBuf,
    port: u16,
    /// Locked, shared, for as long as this process uses the server.
    _users: File,
}

/// A database of one test. Dropped with the test.
pub struct Database {
    /// Its URL.
    pub url: String,
    name: String,
    admin: String,
}

/// The run's server; started if it is not there.
pub async fn shared() -> &'static Server {
    static SHARED: OnceCell<Server> = OnceCell::const_new();
    SHARED
        .get_or_init(|| async {
            if let Some(admin) = variable("ONCEGATE_TEST_POSTGRES") {
                return Server {
                    admin,
                    has_template: false,
                    ours: None,
                };
            }
            match variable("NEXTEST_RUN_ID") {
                Some(run) => start(&format!("run-{run}"), GRACE_SECONDS).await,
                None => start(&format!("process-{}", std::process::id()), 0).await,
            }
        })
        .await
}

/// A server for one test, which may stop and start it.
pub async fn private() -> Server {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    start(&format!("private-{}-{count}", std::process::id()), 0).await
}

/// A database with this program's schema on the run's server.
pub async fn database() -> Database {
    shared().await.database().await
}

/// A configuration for a store on that database.
pub fn config(url: &str) -> StoreConfig {
    StoreConfig {
        url: url.to_owned(),
        migrate: true,
        connections_max: 4,
        acquire_timeout: Duration::from_secs(5),
        operation_timeout: Duration::from_secs(5),
        poll_interval: Duration::from_millis(100),
        notify: true,
        sweep_interval: Duration::from_secs(1),
        purge_interval: Duration::from_secs(1),
    }
}

impl Server {
    /// A database with this program's schema.
    pub async fn database(&self) -> Database {
        if self.has_template {
            return self.create(&format!("template {TEMPLATE}")).await;
        }
        let database = self.create("").await;
        migrate::apply(&database.url).await.unwrap();
        database
    }

    /// A database without a schema.
    pub async fn empty_database(&self) -> Database {
        self.create("").await
    }

    async fn create(&self, how: &str) -> Database {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{}_{count}", std::process::id());
        let database = Database {
            url: with_database(&self.admin, &name),
            name,
            admin: self.admin.clone(),
        };
        execute(
            &self.admin,
            format!("create database {} {how}", database.name),
        )
        .await;
        database
    }

    /// Ends the server at once, as a crash would: no connection is told.
    pub fn crash(&self) {
        self.control(&["stop", "-m", "immediate"]);
    }

    /// Starts it again, on the same port and data.
    pub fn start_again(&self) {
        self.control(&["start", "-w"]);
    }

    /// Whether sessions, those that are open too, may only read.
    pub async fn read_only(&self, only: bool) {
        let setting = format!("alter system set default_transaction_read_only = {only}");
        let mut conn = PgConnection::connect(&self.admin).await.unwrap();
        for sql in [
            "set default_transaction_read_only = off",
            &setting,
            "select pg_reload_conf()",
        ] {
            sqlx::raw_sql(AssertSqlSafe(sql))
                .execute(&mut conn)
                .await
                .unwrap();
        }
    }

    fn control(&self, arguments: &[&str]) {
        let ours = self
            .ours
            .as_ref()
            .expect("only a private server is stopped");
        run(&ours.data, ours.port, arguments);
    }
}

impl Database {
    /// A connection of an operator with a shell.
    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    /// The address of the server.
    pub fn address(&self) -> String {
        let (_, rest) = self.url.split_once('@').unwrap();
        rest.split('/').next().unwrap().to_owned()
    }

    /// What an operator has who dumps it and restores the dump into another database.
    pub async fn restored(&self) -> Self {
        let dump = program("pg_dump").arg(&self.url).output().unwrap();
        assert!(dump.status.success(), "{dump:?}");
        let restored = shared().await.empty_database().await;
        let mut psql = program("psql");
        psql.args(["--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1"]);
        psql.arg(&restored.url).stdin(Stdio::piped());
        let mut psql = psql.stdout(Stdio::null()).spawn().unwrap();
        let mut input = psql.stdin.take().unwrap();
        input.write_all(&dump.stdout).unwrap();
        drop(input);
        assert!(psql.wait().unwrap().success());
        restored
    }

    /// The same database, reached through another address.
    pub fn url_through(&self, address: std::net::SocketAddr) -> String {
        self.url.replace(&self.address(), &address.to_string())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let sql = format!("drop database if exists {} with (force)", self.name);
        let admin = self.admin.clone();
        // A runtime of its own: the test's may be ending. Its server may be down; then there is
        // nothing to drop.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let drop = async {
                if let Ok(mut conn) = PgConnection::connect(&admin).await {
                    let _ = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await;
                }
            };
            runtime.unwrap().block_on(drop);
        });
        let _ = dropping.join();
    }
}

/// Runs a statement on its own connection.
async fn execute(url: &str, sql: String) {
    let mut conn = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(&mut conn)
        .await
        .unwrap();
    conn.close().await.unwrap();
}

/// Joins the server of that name, or starts it.
async fn start(name: &str, grace_seconds: u32) -> Server {
    let directory = std::env::temp_dir().join(format!("oncegate-postgres-{name}"));
    let in_directory = directory.clone();
    let joining = move || join_or_start(&in_directory, grace_seconds);
    let (ours, _starting) = tokio::task::spawn_blocking(joining).await.unwrap();
    let admin = format!("postgres://postgres@127.0.0.1:{}/postgres", ours.port);
    let ready = directory.join("ready");
    if !ready.exists() {
        execute(&admin, format!("create database {TEMPLATE}")).await;
        migrate::apply(&with_database(&admin, TEMPLATE))
            .await
            .unwrap();
        fs::write(&ready, "").unwrap();
    }
    Server {
        admin,
        has_template: true,
        ours: Some(ours),
    }
}

/// With a file whose lock keeps others from using the server before it is ready.
fn join_or_start(directory: &Path, grace_seconds: u32) -> (Ours, File) {
    let users = lock_users(directory);
    let starting = File::create(directory.join("starting")).unwrap();
    starting.lock().unwrap();
    let data = directory.join("data");
    let port_file = directory.join("port");
    let port = if let Ok(port) = fs::read_to_string(&port_file) {
        port.parse().unwrap()
    } else {
        // First, so that it also ends what is left half started.
        watch(directory, grace_seconds);
        let port = free_port();
        make(&data);
        run(&data, port, &["start", "-w"]);
        fs::write(&port_file, port.to_string()).unwrap();
        port
    };
    let ours = Ours {
        data,
        port,
        _users: users,
    };
    (ours, starting)
}

/// Locks the file that tells the watchdog that somebody is there.
fn lock_users(directory: &Path) -> File {
    let path = directory.join("users");
    loop {
        fs::create_dir_all(directory).unwrap();
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        let users = File::create(&path).unwrap();
        users.lock_shared().unwrap();
        // The watchdog may have removed the directory while we waited.
        let locked = users.metadata().unwrap().ino();
        if fs::metadata(&path).is_ok_and(|there| there.ino() == locked) {
            return users;
        }
    }
}

fn watch(directory: &Path, grace_seconds: u32) {
    let status = Command::new("sh")
        .args([
            "-c",
            r#"command -v flock || exit 1; sh -c "$0" watchdog "$@" &"#,
        ])
        .arg(include_str!("watchdog.sh"))
        .arg(directory)
        .arg(grace_seconds.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A group of its own: what ends the tests does not end it.
        .process_group(0)
        .status();
    let started = status.is_ok_and(|status| status.success());
    assert!(
        started,
        "sh and flock are needed, or ONCEGATE_TEST_POSTGRES"
    );
}

/// Makes an empty cluster.
fn make(data: &Path) {
    fs::create_dir(data).unwrap();
    if let Some(owner) = owner() {
        chown(data, Some(owner), None).unwrap();
    }
    let mut initdb = program("initdb");
    let options = [
        "--auth=trust",
        "--username=postgres",
        "--encoding=UTF8",
        "--no-sync",
    ];
    ended_well(initdb.arg("-D").arg(data).args(options).arg("--locale=C"));
    // fsync = off only spares waiting: nothing here survives the machine.
    let settings = "fsync = off\nmax_connections = 200\nshared_buffers = 32MB\n\
                    unix_socket_directories = ''\nlisten_addresses = '127.0.0.1'\n";
    let file = data.join("postgresql.conf");
    let defaults = fs::read_to_string(&file).unwrap();
    fs::write(&file, defaults + settings).unwrap();
}

/// Runs `pg_ctl`.
fn run(data: &Path, port: u16, arguments: &[&str]) {
    let mut control = program("pg_ctl");
    control.arg("-D").arg(data).arg("-l").arg(data.join("log"));
    ended_well(control.arg("-o").arg(format!("-p {port}")).args(arguments));
}

/// One of PostgreSQL's programs, as a user that it accepts.
fn program(name: &str) -> Command {
    let path = newest_installation().join(name);
    let mut command = if owner().is_some() {
        let mut command = Command::new("runuser");
        command.args(["-u", "postgres", "--"]).arg(path);
        command
    } else {
        Command::new(path)
    };
    command.current_dir("/").stdin(Stdio::null());
    command
}

fn ended_well(command: &mut Command) {
    // Not piped: the server would keep the pipe open.
    let status = command.stdout(Stdio::null()).status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

/// Where the newest PostgreSQL's programs are; else whatever the search path has.
fn newest_installation() -> PathBuf {
    let installed = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    let version = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let newest = installed.filter_map(version).max();
    newest.map_or_else(PathBuf::new, |newest| {
        PathBuf::from(format!("/usr/lib/postgresql/{newest}/bin"))
    })
}

/// Whom the cluster must belong to when root runs the tests: PostgreSQL refuses root.
fn owner() -> Option<u32> {
    let id = |arguments: &[&str]| {
        let output = Command::new("id").args(arguments).output().unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .trim()
            .parse::<u32>()
            .unwrap()
    };
    (id(&["-u"]) == 0).then(|| id(&["-u", "postgres"]))
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

fn with_database(url: &str, database: &str) -> String {
    let (server, _) = url.rsplit_once('/').unwrap();
    format!("{server}/{database}")
}

#[expect(
    clippy::disallowed_methods,
    reason = "which server a run uses is told by its environment"
)]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
