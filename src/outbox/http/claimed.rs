//! A request's body that asks for its claim when it is first read.
//!
//! It is read once the connection is there and, over HTTP/1.1, before anything of the request is
//! written: the head waits in the same buffer. Over HTTP/2 the head may be ahead of it; a request
//! whose body then ends with a reset is none that a receiver can take.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::upstream::SendProgress;

/// The claim was lost, or its call abandoned, before the body was read.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("its claim was lost before it was sent")]
pub struct Lost;

/// See the module.
pub struct ClaimedBody {
    progress: SendProgress,
    bytes: Option<Bytes>,
}

impl ClaimedBody {
    /// These bytes, if `progress` lets them pass. They must not be none: a body that is known to
    /// be empty is never read.
    pub fn new(bytes: Bytes, progress: SendProgress) -> Self {
        let bytes = Some(bytes);
        Self { progress, bytes }
    }
}

impl Body for ClaimedBody {
    type Data = Bytes;
    type Error = Lost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Lost>>> {
        let frame = self.bytes.take().map(|bytes| {
            let claimed = self.progress.claim();
            claimed.then(|| Frame::data(bytes)).ok_or(Lost)
        });
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.bytes.as_ref().map_or(0, Bytes::len);
        SizeHint::with_exact(length as u64)
    }
}
