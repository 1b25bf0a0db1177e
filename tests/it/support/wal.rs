//! Watches the writes to a SQLite file's log, and kills a process at one of them.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::watch;

/// How often the thread looks for a write that it was not told of yet.
const GLANCE: Duration = Duration::from_micros(50);

/// Counts writes from its start until it is dropped.
pub struct LogWatch {
    writes: watch::Sender<usize>,
    stop: Arc<AtomicBool>,
}

impl LogWatch {
    /// Of the log of this database, which some process has open. `kill`: the process to kill at the
    /// write of this number.
    pub fn start(database: &Path, kill: Option<(Pid, usize)>) -> Self {
        let mut log = database.as_os_str().to_owned();
        log.push("-wal");
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&events, Path::new(&log), WatchFlags::MODIFY).unwrap();
        let watch = Self {
            writes: watch::Sender::default(),
            stop: Arc::default(),
        };
        let (writes, stop) = (watch.writes.clone(), Arc::clone(&watch.stop));
        std::thread::spawn(move || {
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = Reader::new(events, &mut buffer);
            while !stop.load(Ordering::Relaxed) {
                match events.next() {
                    Ok(event) if event.events().contains(ReadFlags::MODIFY) => {
                        let count = *writes.borrow() + 1;
                        if let Some((process, _)) = kill.filter(|(_, at)| *at == count) {
                            let _ = kill_process(process, Signal::KILL);
                        }
                        writes.send_replace(count);
                    }
                    Err(Errno::AGAIN) => std::thread::sleep(GLANCE),
                    other => {
                        other.unwrap();
                    }
                }
            }
        });
        watch
    }

    /// Waits for the write of this number.
    pub async fn until(&self, number: usize) {
        let mut writes = self.writes.subscribe();
        writes.wait_for(|writes| *writes >= number).await.unwrap();
    }

    /// Writes so far; several at once may count as one.
    pub fn writes(&self) -> usize {
        *self.writes.borrow()
    }
}

impl Drop for LogWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
