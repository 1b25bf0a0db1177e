//! A client that sends bytes as they are and reads answers one by one.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// How long anything may take before a test gives up.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// One HTTP/1.1 connection.
pub struct Raw<S = TcpStream> {
    pub stream: S,
    unread: Vec<u8>,
}

/// One answer as it came.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    /// Whether the body came to its marked end.
    pub whole: bool,
}

impl Answer {
    /// The values of a header, in order.
    pub fn header(&self, name: &str) -> Vec<String> {
        let lines = self.headers.iter().filter(|(line, _)| line == name);
        lines
            .map(|(_, value)| String::from_utf8_lossy(value).into_owned())
            .collect()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The end of the problem's `type`.
    pub fn problem(&self) -> String {
        let document: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(document["status"], self.status);
        let kind = document["type"].as_str().unwrap();
        kind.rsplit('/').next().unwrap().to_owned()
    }
}

impl Raw {
    pub async fn connect(addr: SocketAddr) -> Self {
        Self::over(TcpStream::connect(addr).await.unwrap())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Raw<S> {
    pub fn over(stream: S) -> Self {
        let unread = Vec::new();
        Self { stream, unread }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    /// The next answer, to a request that was no HEAD.
    pub async fn answer(&mut self) -> Answer {
        self.answer_to("GET").await
    }

    pub async fn answer_to(&mut self, method: &str) -> Answer {
        let head = self.until(b"\r\n\r\n").await.expect("an answer");
        let mut lines = head.trim_ascii_end().split(|byte| *byte == b'\n');
        let status = String::from_utf8(lines.next().unwrap().to_vec()).unwrap();
        let status = status.split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<_> = lines
            .map(|line| {
                let colon = line.iter().position(|byte| *byte == b':').unwrap();
                let name = String::from_utf8(line[..colon].to_ascii_lowercase()).unwrap();
                (name, line[colon + 1..].trim_ascii().to_vec())
            })
            .collect();
        let mut answer = Answer {
            status,
            headers,
            body: Vec::new(),
            whole: true,
        };
        if method == "HEAD" || status < 200 || status == 204 || status == 304 {
            return answer;
        }
        if answer.header("transfer-encoding") == ["chunked"] {
            answer.whole = self.chunks(&mut answer.body).await.is_some();
        } else if let [length] = &answer.header("content-length")[..] {
            let body = self.exactly(length.parse().unwrap()).await;
            answer.whole = body.is_some();
            answer.body = body.unwrap_or_default();
        } else {
            answer.body = self.rest().await;
        }
        answer
    }

    async fn chunks(&mut self, body: &mut Vec<u8>) -> Option<()> {
        loop {
            let line = self.until(b"\r\n").await?;
            let size = String::from_utf8(line).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            body.extend(self.exactly(size).await?);
            self.until(b"\r\n").await?;
            if size == 0 {
                return Some(());
            }
        }
    }

    /// Bytes up to and with this mark. `None`: the connection ended before.
    pub async fn until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            let found = self
                .unread
                .windows(mark.len())
                .position(|window| window == mark);
            if let Some(at) = found {
                let rest = self.unread.split_off(at + mark.len());
                return Some(std::mem::replace(&mut self.unread, rest));
            }
            self.more().await?;
        }
    }

    /// This many bytes. `None`: the connection ended before.
    pub async fn exactly(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.unread.len() < count {
            self.more().await?;
        }
        let rest = self.unread.split_off(count);
        Some(std::mem::replace(&mut self.unread, rest))
    }

    /// All that comes until the end of the connection, in order or by reset.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.more().await.is_some() {}
        std::mem::take(&mut self.unread)
    }

    async fn more(&mut self) -> Option<()> {
        let read = self.stream.read_buf(&mut self.unread);
        let read = tokio::time::timeout(DEADLINE, read)
            .await
            .expect("no byte in time");
        read.ok().filter(|read| *read > 0).map(|_| ())
    }
}

/// One HTTP/2 connection.
pub struct Http2 {
    pub sender: h2::client::SendRequest<Bytes>,
    connection: JoinSet<Result<(), h2::Error>>,
}

impl Http2 {
    pub async fn connect(addr: SocketAddr) -> Self {
        Self::over(TcpStream::connect(addr).await.unwrap()).await
    }

    pub async fn over<S>(stream: S) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, driver) = h2::client::handshake(stream).await.unwrap();
        let mut connection = JoinSet::new();
        connection.spawn(driver);
        Self { sender, connection }
    }

    /// Sends a request and reads its answer whole.
    pub async fn ask(&self, request: Request<()>, body: &'static [u8]) -> Response<Vec<u8>> {
        let mut sender = self.sender.clone().ready().await.unwrap();
        let (response, mut stream) = sender.send_request(request, body.is_empty()).unwrap();
        if !body.is_empty() {
            stream.send_data(Bytes::from_static(body), true).unwrap();
        }
        let response = tokio::time::timeout(DEADLINE, response).await;
        let (head, mut incoming) = response.expect("an answer").unwrap().into_parts();
        let mut body = Vec::new();
        while let Some(data) = incoming.data().await {
            let data = data.unwrap();
            incoming
                .flow_control()
                .release_capacity(data.len())
                .unwrap();
            body.extend_from_slice(&data);
        }
        Response::from_parts(head, body)
    }

    /// Waits until the connection has ended.
    pub async fn ended(&mut self) -> Result<(), h2::Error> {
        let ended = tokio::time::timeout(DEADLINE, self.connection.join_next()).await;
        ended.expect("the connection ends").unwrap().unwrap()
    }
}

/// A request to a host that no test cares about.
pub fn to(method: &str, path: &str) -> Request<()> {
    let uri = format!("http://a.example{path}");
    Request::builder().method(method).uri(uri).body(()).unwrap()
}
