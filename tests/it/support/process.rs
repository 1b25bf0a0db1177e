//! The gateway's process: started, listened to, signalled, and always ended.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::clock::{PATIENCE, eventually};

/// A running `oncegate`, or one that has ended.
pub struct Process {
    child: Child,
    log: Log,
    status: Option<ExitStatus>,
}

/// Everything that a process wrote to its standard output and error so far.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// The lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether any line holds `text`.
    pub fn holds(&self, text: &str) -> bool {
        self.lines().iter().any(|line| line.contains(text))
    }

    fn follow(&self, source: impl std::io::Read + Send + 'static) {
        let log = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(source).split(b'\n') {
                let Ok(line) = line else { return };
                let line = String::from_utf8_lossy(&line).into_owned();
                log.0
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(line);
            }
        });
    }
}

impl Process {
    /// Starts the binary under test.
    pub fn start(arguments: &[String], environment: &[(String, String)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(arguments).envs(environment.iter().cloned());
        Self::spawn(command)
    }

    /// Starts any program.
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("can't start {command:?}: {error}"));
        let log = Log::default();
        log.follow(child.stdout.take().expect("piped"));
        log.follow(child.stderr.take().expect("piped"));
        Self {
            child,
            log,
            status: None,
        }
    }

    /// What it wrote.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Sends a signal. Nothing happens when the process has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            kill_process(self.id(), signal).expect("the process is ours");
        }
    }

    /// Its number, as long as it was not waited for.
    pub fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("the process is ours");
        }
        self.status
    }

    /// Waits for its end.
    pub async fn end(&mut self) -> ExitStatus {
        eventually("the process ends", async || self.ended()).await
    }

    /// Waits for its end without a runtime; kills it when it takes longer than `limit`.
    pub fn end_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        while self.ended().is_none() {
            if start.elapsed() > limit {
                self.kill();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.status
    }

    /// `SIGKILL`, and gone.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }

    /// Waits until a line of the log gives a value.
    pub async fn tells<T>(&mut self, what: &str, mut read: impl FnMut(&str) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = self.log.lines().iter().find_map(|line| read(line)) {
                return value;
            }
            let ended = self.ended();
            assert!(
                ended.is_none() && start.elapsed() < PATIENCE,
                "the log never told {what} (ended: {ended:?}):\n{}",
                self.log.lines().join("\n")
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        self.kill();
    }
}

/// Runs the binary under test to its end; gives its status and all that it wrote.
pub async fn run(arguments: &[String]) -> (ExitStatus, String) {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PATIENCE, output)
        .await
        .expect("the process ends")
        .expect("the binary starts");
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    (output.status, text)
}

/// A directory for one test's files; removed at the end.
pub fn scratch() -> tempfile::TempDir {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    tempfile::tempdir_in(parent).expect("the target directory takes files")
}
