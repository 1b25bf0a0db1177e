//! Takes a guarded request's body in, whole and bounded: by the route's limit, by time, and by a
//! budget that all bodies of the gateway share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use super::BoxError;
use crate::problem::{Kind, Problem, RETRY_AFTER};
use crate::telemetry::metric;

/// Room for the bodies of owners and waiters together.
#[derive(Clone, Debug)]
pub struct BodyBudget(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    bytes_max: usize,
    taken: AtomicUsize,
}

/// A whole body. Its room in the budget is given back when the last copy is dropped.
#[derive(Clone, Debug)]
pub struct Captured {
    bytes: Bytes,
    _room: Arc<Room>,
}

/// A part of the budget, given back on drop.
#[derive(Debug)]
struct Room {
    budget: BodyBudget,
    bytes: usize,
}

/// Why there is no whole body.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// More than the route takes.
    #[error("the body is longer than {bytes_max} bytes")]
    TooLarge {
        /// The route's limit.
        bytes_max: usize,
    },
    /// The budget is used up.
    #[error("there is no room for another body")]
    NoRoom,
    /// The client took too long.
    #[error("the body took longer than {0:?}")]
    TimedOut(Duration),
    /// The client broke off, or the body was malformed.
    #[error("the body broke off")]
    Truncated(#[source] BoxError),
}

impl BodyBudget {
    /// Room for this many bytes.
    pub fn new(bytes_max: usize) -> Self {
        let taken = AtomicUsize::new(0);
        Self(Arc::new(Budget { bytes_max, taken }))
    }

    fn has_room(&self, bytes: usize) -> bool {
        let free = self.0.bytes_max - self.0.taken.load(Ordering::Relaxed);
        bytes <= free
    }

    fn take(&self, bytes: usize) -> bool {
        let more = |taken: usize| {
            let taken = taken.checked_add(bytes)?;
            (taken <= self.0.bytes_max).then_some(taken)
        };
        let taken = &self.0.taken;
        let took = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        took.is_ok()
    }
}

impl Room {
    fn none(budget: &BodyBudget) -> Self {
        let budget = budget.clone();
        Self { budget, bytes: 0 }
    }

    #[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
    fn grow(&mut self, bytes: usize) -> bool {
        let took = self.budget.take(bytes);
        if took {
            self.bytes += bytes;
            metrics::gauge!(metric::BODY_BYTES).increment(bytes as f64);
        }
        took
    }
}

impl Drop for Room {
    #[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
    fn drop(&mut self) {
        self.budget.0.taken.fetch_sub(self.bytes, Ordering::Relaxed);
        metrics::gauge!(metric::BODY_BYTES).decrement(self.bytes as f64);
    }
}

impl Captured {
    /// The body. A copy of these bytes alone does not hold the room.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl CaptureError {
    /// What the client is told.
    pub fn problem(&self) -> Problem {
        let invalid = |detail: &str| Problem::new(Kind::RequestInvalid, detail);
        match self {
            Self::TooLarge { bytes_max } => Problem::new(
                Kind::BodyTooLarge,
                format!("A guarded body may have at most {bytes_max} bytes. Nothing was sent."),
            )
            .member("body_bytes_max", *bytes_max),
            Self::NoRoom => Problem::new(
                Kind::Overloaded,
                "The gateway has no room for another request body. Try again later with the same \
                 key.",
            )
            .retry_after(RETRY_AFTER),
            Self::TimedOut(_) => invalid(
                "The body did not arrive in time. Nothing was sent; try again with the same key.",
            ),
            Self::Truncated(_) => {
                invalid("The body broke off. Nothing was sent; try again with the same key.")
            }
        }
    }
}

/// Reads a body to its end. Trailers are dropped. A length that is declared and too long, or for
/// which there is no room, is refused before anything is read, so that a client that waits for
/// `100 Continue` need not send it.
///
/// Room is taken as bytes arrive, never ahead of them: a client that declares much and sends
/// little holds little.
///
/// # Errors
/// When the body is longer than `bytes_max`, the budget has no room, the whole takes longer than
/// `timeout`, or the client breaks off.
pub async fn capture<B>(
    body: B,
    bytes_max: usize,
    budget: &BodyBudget,
    timeout: Duration,
) -> Result<Captured, CaptureError>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let declared = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if declared > bytes_max {
        return Err(CaptureError::TooLarge { bytes_max });
    }
    if !budget.has_room(declared) {
        return Err(CaptureError::NoRoom);
    }
    tokio::time::timeout(timeout, collect(body, bytes_max, budget))
        .await
        .unwrap_or(Err(CaptureError::TimedOut(timeout)))
}

async fn collect<B>(
    mut body: B,
    bytes_max: usize,
    budget: &BodyBudget,
) -> Result<Captured, CaptureError>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let mut room = Room::none(budget);
    // Most bodies are one frame, which is kept as it came.
    let mut first = Bytes::new();
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| CaptureError::Truncated(error.into()))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if data.len() > bytes_max - room.bytes {
            return Err(CaptureError::TooLarge { bytes_max });
        }
        let is_first = room.bytes == 0;
        if !room.grow(data.len()) {
            return Err(CaptureError::NoRoom);
        }
        if is_first {
            first = data;
        } else {
            whole.extend_from_slice(&std::mem::take(&mut first));
            whole.extend_from_slice(&data);
        }
    }
    let bytes = if whole.is_empty() {
        first
    } else {
        whole.freeze()
    };
    Ok(Captured {
        bytes,
        _room: Arc::new(room),
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{StreamExt, stream};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    const LONG: Duration = Duration::from_hours(1);

    fn framed(
        frames: Vec<&'static [u8]>,
    ) -> impl http_body::Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames = frames
            .into_iter()
            .map(|data| Ok(Frame::data(Bytes::from_static(data))));
        StreamBody::new(stream::iter(frames))
    }

    fn taken(budget: &BodyBudget) -> usize {
        budget.0.taken.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn a_body_in_one_frame_is_not_copied() {
        let budget = BodyBudget::new(100);
        let sent = Bytes::from(vec![7; 50]);
        let captured = capture(Full::new(sent.clone()), 50, &budget, LONG)
            .await
            .unwrap();
        assert_eq!(captured.bytes().as_ptr(), sent.as_ptr());
        assert_eq!(captured.bytes(), &sent);
    }

    #[tokio::test]
    async fn room_is_held_until_the_last_copy_is_gone() {
        let budget = BodyBudget::new(10);
        let first = capture(framed(vec![b"abc", b"", b"def"]), 8, &budget, LONG)
            .await
            .unwrap();
        assert_eq!(&first.bytes()[..], b"abcdef");
        let copy = first.clone();
        drop(first);
        let refused = capture(framed(vec![b"abc", b"de"]), 8, &budget, LONG).await;
        assert!(matches!(refused, Err(CaptureError::NoRoom)), "{refused:?}");
        assert_eq!(
            taken(&budget),
            6,
            "a refused body gives back what it had taken"
        );
        drop(copy);
        assert_eq!(taken(&budget), 0);
        assert!(
            capture(framed(vec![b"0123456789"]), 10, &budget, LONG)
                .await
                .is_ok()
        );
    }

    #[tokio::test]
    async fn a_declared_length_is_refused_before_anything_is_read() {
        let budget = BodyBudget::new(10);
        let unread = |bytes: usize| Full::new(Bytes::from(vec![0; bytes]));
        let too_large = capture(unread(9), 8, &budget, LONG).await;
        assert!(matches!(
            too_large,
            Err(CaptureError::TooLarge { bytes_max: 8 })
        ));
        let no_room = capture(unread(11), 20, &budget, LONG).await;
        assert!(matches!(no_room, Err(CaptureError::NoRoom)));
    }

    #[tokio::test]
    async fn an_undeclared_length_is_refused_where_it_passes_the_limit() {
        let budget = BodyBudget::new(100);
        let frames = stream::repeat_with(|| {
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"endless")))
        });
        let endless = StreamBody::new(frames);
        let too_large = capture(endless, 50, &budget, LONG).await;
        assert!(matches!(too_large, Err(CaptureError::TooLarge { .. })));
        let exact = capture(framed(vec![b"12345", b"67890"]), 10, &budget, LONG).await;
        assert_eq!(exact.unwrap().bytes().len(), 10);
        assert_eq!(taken(&budget), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_is_for_the_whole_body_however_it_drips() {
        let budget = BodyBudget::new(100);
        let drip = stream::repeat(b"x").then(|byte| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(byte)))
        });
        let started = tokio::time::Instant::now();
        let timed_out = capture(
            Box::pin(StreamBody::new(drip)),
            100,
            &budget,
            5 * Duration::from_secs(1),
        )
        .await;
        assert!(matches!(timed_out, Err(CaptureError::TimedOut(_))));
        assert_eq!(started.elapsed().as_secs(), 5);
        assert_eq!(taken(&budget), 0);
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_never_taken_for_whole() {
        let budget = BodyBudget::new(100);
        let frames = [
            Ok(Frame::data(Bytes::from_static(b"half"))),
            Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof)),
        ];
        let broken = StreamBody::new(stream::iter(frames));
        let truncated = capture(broken, 50, &budget, LONG).await;
        assert!(matches!(truncated, Err(CaptureError::Truncated(_))));
    }

    #[tokio::test]
    async fn trailers_are_dropped() {
        let budget = BodyBudget::new(100);
        let frames: [Result<_, Infallible>; 2] = [
            Ok(Frame::data(Bytes::from_static(b"data"))),
            Ok(Frame::trailers(http::HeaderMap::new())),
        ];
        let body = StreamBody::new(stream::iter(frames));
        let captured = capture(body, 50, &budget, LONG).await.unwrap();
        assert_eq!(&captured.bytes()[..], b"data");
    }
}
