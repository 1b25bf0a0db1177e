//! HTTP/2 stream by stream.

use std::net::SocketAddr;

use bytes::{Buf, Bytes, BytesMut};
use tokio::net::TcpStream;
use tokio_util::task::TaskTracker;

use super::{Answer, Call};
use crate::support::clock::PATIENCE;

/// An HTTP/2 connection.
pub struct Http2 {
    sender: h2::client::SendRequest<Bytes>,
    driver: tokio::task::JoinHandle<()>,
}

/// An HTTP/2 request that waits for its answer.
pub struct Stream {
    answer: h2::client::ResponseFuture,
    sending: h2::SendStream<Bytes>,
}

impl Http2 {
    /// Connects with prior knowledge.
    pub async fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("it listens");
        let (sender, connection) = h2::client::handshake(stream)
            .await
            .expect("it speaks HTTP/2");
        let driver = TaskTracker::new().spawn(async move {
            let _ended = connection.await;
        });
        Self { sender, driver }
    }

    /// Sends a request whole.
    pub async fn start(&self, call: &Call) -> Stream {
        let uri = format!("http://gateway.test{}", call.target);
        let mut request = http::Request::builder()
            .method(call.method.as_str())
            .uri(uri)
            .version(http::Version::HTTP_2);
        for (name, value) in call.headers.iter().filter(|(name, _)| name != "Host") {
            request = request.header(name.to_ascii_lowercase(), value.as_slice());
        }
        let request = request.body(()).expect("a request");
        let mut sender = self.sender.clone().ready().await.expect("it takes streams");
        let (answer, mut sending) = sender.send_request(request, false).expect("it is sent");
        let body = Bytes::from(call.body.clone());
        sending.send_data(body, true).expect("it is sent");
        Stream { answer, sending }
    }

    /// Sends a request and reads its answer.
    pub async fn send(&self, call: &Call) -> Answer {
        self.start(call).await.answer().await
    }

    /// Closes the whole connection at once.
    pub fn cut(self) {
        self.driver.abort();
    }
}

impl Stream {
    /// Its answer, whole.
    pub async fn answer(self) -> Answer {
        let answer = tokio::time::timeout(PATIENCE, self.answer);
        let answer = answer.await.expect("in time").expect("an answer");
        let (head, mut incoming) = answer.into_parts();
        let mut body = BytesMut::new();
        while let Some(data) = incoming.data().await {
            let data = data.expect("the answer is whole");
            let _released = incoming.flow_control().release_capacity(data.remaining());
            body.extend_from_slice(&data);
        }
        let headers = head.headers.iter();
        let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
        Answer {
            status: head.status.as_u16(),
            headers: headers.collect(),
            body: body.freeze(),
        }
    }

    /// Takes the request back (`RST_STREAM`, CANCEL).
    pub fn cancel(mut self) {
        self.sending.send_reset(h2::Reason::CANCEL);
    }
}
