//! Waiting without sleeping blindly: look again until it is so, or fail at a deadline.

use std::time::{Duration, Instant};

/// How long the harness waits for anything before it calls the promise broken.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What counts as at once: less than any wait of a test's routes, and enough for a busy machine.
pub const AT_ONCE: Duration = Duration::from_secs(3);

/// How often [`eventually`] looks.
const GLANCE: Duration = Duration::from_millis(10);

/// Looks until `look` gives a value. Panics after [`PATIENCE`], saying `what` never came.
pub async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Option<T>) -> T {
    within(PATIENCE, what, look).await
}

/// Looks until `look` gives a value. Panics after `limit`, saying `what` never came.
pub async fn within<T>(limit: Duration, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(GLANCE).await;
    }
}

/// Lets time pass that a test is about: a lease, a validity. For nothing else.
pub async fn let_pass(time: Duration) {
    tokio::time::sleep(time).await;
}

/// The environment that makes a process see a wall clock that is off by `offset` (such as `+1h`),
/// its monotonic clock untouched. `None` where libfaketime is not installed.
pub fn wall_clock_off_by(offset: &str) -> Option<Vec<(String, String)>> {
    let library = [
        "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
        "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    ]
    .into_iter()
    .find(|path| std::path::Path::new(path).exists())?;
    Some(vec![
        ("LD_PRELOAD".to_owned(), library.to_owned()),
        ("FAKETIME".to_owned(), offset.to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC".to_owned(), "1".to_owned()),
    ])
}
