//! HTTP/1.1 and HTTP/2, in the clear and over TLS.

use std::sync::Arc;

use http_body_util::BodyExt;
use oncegate::config::ServerTls;
use oncegate::proxy::listener::Tls;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use rustls_pki_types::pem::PemObject;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use super::client::{Http2, Raw, to};
use super::server::{Server, answer, limits};

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    for number in 0..3 {
        let request = format!("PUT /{number} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab");
        client.send(request).await;
        let answer = client.answer().await;
        assert_eq!(answer.text(), format!("PUT /{number} 2"));
        assert!(answer.header("connection").is_empty());
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_their_order() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    let request =
        |number| format!("POST /{number} HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx");
    let requests: Vec<String> = (0..40).map(request).collect();
    client.send(requests.concat()).await;
    for number in 0..40 {
        assert_eq!(client.answer().await.text(), format!("POST /{number} 1"));
    }
}

#[tokio::test]
async fn http_1_0_is_answered_and_closed() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.send("GET / HTTP/1.0\r\n\r\n").await;
    assert_eq!(client.answer().await.text(), "GET / 0");
    assert_eq!(client.rest().await, b"");
}

#[tokio::test]
async fn http2_without_tls_is_spoken_to_clients_that_begin_with_it() {
    let server = Server::start().await;
    let client = Http2::connect(server.addr).await;
    for number in 0..20 {
        let asked = client
            .ask(to("POST", &format!("/{number}")), b"hello")
            .await;
        let expected = format!("POST http://a.example/{number} 5");
        assert_eq!(String::from_utf8_lossy(asked.body()), expected);
    }
}

#[tokio::test]
async fn a_client_is_told_to_continue_when_its_body_is_wanted_and_only_then() {
    let server = Server::with(limits(), None, |request, _| async move {
        if request.uri() == "/refused" {
            return answer(413, "");
        }
        let body = request.into_body().collect().await.unwrap();
        answer(200, body.to_bytes())
    })
    .await;
    let head = |path| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
    };
    let mut client = server.connect().await;
    client.send(head("/wanted")).await;
    assert_eq!(client.answer().await.status, 100);
    client.send("ok").await;
    assert_eq!(client.answer().await.text(), "ok");

    let mut client = server.connect().await;
    client.send(head("/refused")).await;
    assert_eq!(client.answer().await.status, 413);
}

#[tokio::test]
async fn a_client_that_closes_its_sending_side_still_gets_the_whole_answer() {
    let gate = CancellationToken::new();
    let held = gate.clone();
    let server = Server::with(limits(), None, move |request, _| {
        let gate = held.clone();
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            gate.cancelled().await;
            answer(200, [body.to_vec(), vec![b'x'; 500_000]].concat())
        }
    })
    .await;
    let mut client = server.connect().await;
    client
        .send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nok")
        .await;
    client.stream.shutdown().await.unwrap();
    // The server reads the end of the stream before the answer is there.
    while server.calls() == 0 {
        tokio::task::yield_now().await;
    }
    gate.cancel();
    let answer = client.answer().await;
    assert!(answer.whole);
    assert_eq!(answer.body.len(), 500_002);
    assert_eq!(client.rest().await, b"");
}

#[tokio::test]
async fn an_early_refusal_reaches_a_client_that_is_still_sending() {
    let refuse = |_, _| async { answer(413, "too much") };
    let server = Server::with(limits(), None, refuse).await;
    let length = 4 << 20;
    for _ in 0..20 {
        let mut client = server.connect().await;
        client
            .send(format!(
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n"
            ))
            .await;
        client.send(vec![b'x'; length]).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (413, "too much"));
    }
}

/// A certificate for `localhost`, as files, and who trusts it.
struct Certificate {
    files: ServerTls,
    trust: rustls::RootCertStore,
    _dir: tempfile::TempDir,
}

impl Certificate {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let files = ServerTls {
            certificate: dir.path().join("chain.pem"),
            key: dir.path().join("key.pem"),
        };
        std::fs::write(&files.certificate, made.cert.pem()).unwrap();
        std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
        let mut trust = rustls::RootCertStore::empty();
        let pem = made.cert.pem();
        let der = rustls_pki_types::CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        trust.add(der).unwrap();
        Self {
            files,
            trust,
            _dir: dir,
        }
    }

    async fn connect(&self, server: &Server, alpn: &[&str]) -> TlsStream<TcpStream> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.trust.clone())
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let tcp = TcpStream::connect(server.addr).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, tcp)
            .await
            .unwrap()
    }
}

#[tokio::test]
async fn over_tls_the_client_chooses_the_protocol() {
    let certificate = Certificate::new();
    let tls = Tls::load(&certificate.files).unwrap();
    let server = Server::with(limits(), Some(tls), |request, peer| async move {
        answer(200, format!("{:?} {}", request.version(), peer.tls))
    })
    .await;

    let stream = certificate.connect(&server, &["h2", "http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let asked = Http2::over(stream).await.ask(to("GET", "/"), b"").await;
    assert_eq!(asked.body(), b"HTTP/2.0 true");

    for alpn in [&["http/1.1"][..], &[]] {
        let mut client = Raw::over(certificate.connect(&server, alpn).await);
        client
            .send("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            .await;
        assert_eq!(client.answer().await.text(), "HTTP/1.1 true");
        assert_eq!(client.rest().await, b"");
    }
}

#[tokio::test]
async fn what_is_no_tls_gets_no_answer_where_tls_is_spoken() {
    let certificate = Certificate::new();
    let tls = Tls::load(&certificate.files).unwrap();
    let server = Server::with(limits(), Some(tls), |_, _| async { answer(200, "") }).await;
    let mut client = server.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let rest = String::from_utf8_lossy(&client.rest().await).into_owned();
    assert!(!rest.contains("HTTP"), "{rest}");
    assert_eq!(server.calls(), 0);
}

/// HTTP/2 requests that its own client refuses to send, frame by frame.
async fn ask_malformed(server: &Server, fields: &[(&str, &str)], data: Option<&[u8]>) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    frame(&mut bytes, 4, 0, 0, &[]);
    let mut block = Vec::new();
    for (name, value) in fields {
        // Literal without indexing, no Huffman code (RFC 7541 section 6.2.2).
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    let end_stream = u8::from(data.is_none());
    frame(&mut bytes, 1, 4 | end_stream, 1, &block);
    if let Some(data) = data {
        frame(&mut bytes, 0, 1, 1, data);
    }
    // Whatever became of the stream, the connection is then ended in order.
    frame(&mut bytes, 7, 0, 0, &[0; 8]);
    stream.write_all(&bytes).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let _ = tokio::time::timeout(super::client::DEADLINE, read)
        .await
        .unwrap();
    answer
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    bytes.extend_from_slice(&length[1..]);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}

#[tokio::test]
async fn an_http2_request_that_is_no_sound_message_reaches_no_handler() {
    let sound = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "a.example"),
        (":path", "/"),
    ];
    let server = Server::start().await;
    ask_malformed(&server, &sound, None).await;
    assert_eq!(server.calls(), 1, "the frames themselves are sound");
    for fields in [
        &[("transfer-encoding", "chunked")][..],
        &[("connection", "close")],
        &[("connection", "idempotency-key")],
        &[("keep-alive", "timeout=5")],
        &[("proxy-connection", "close")],
        &[("upgrade", "websocket")],
        &[("te", "gzip")],
        &[("Idempotency-Key", "k")],
        &[("host", "b.example")],
        &[("host", "a.example"), ("host", "a.example")],
        &[("content-length", "5"), ("content-length", "6")],
        &[("content-length", "0"), ("content-length", "0")],
        &[("content-length", "x")],
        &[("x", "a\r\nhost: b")],
        &[("x\r\nhost", "b")],
        &[(":path", "/again")],
        &[(":status", "200")],
    ] {
        let server = Server::start().await;
        ask_malformed(&server, &[&sound, fields].concat(), None).await;
        assert_eq!(server.calls(), 0, "{fields:?}");
    }
    for missing in 0..sound.len() {
        let server = Server::start().await;
        let mut fields = sound.to_vec();
        fields.remove(missing);
        ask_malformed(&server, &fields, None).await;
        assert_eq!(server.calls(), 0, "without {:?}", sound[missing]);
    }
    let connect = [(":method", "CONNECT"), (":authority", "a.example:80")];
    let server = Server::start().await;
    ask_malformed(&server, &connect, None).await;
    assert_eq!(server.calls(), 0, "CONNECT");
}

#[tokio::test]
async fn an_http2_body_of_another_length_is_never_taken_for_whole() {
    let head = |length| {
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "a.example"),
            (":path", "/"),
            ("content-length", length),
        ]
    };
    for (length, whole) in [("5", true), ("6", false), ("4", false), ("0", false)] {
        let server = Server::start().await;
        let answer = ask_malformed(&server, &head(length), Some(b"hello")).await;
        let text = String::from_utf8_lossy(&answer).into_owned();
        assert_eq!(
            text.contains("POST http://a.example/ 5"),
            whole,
            "{length}: {text:?}"
        );
    }
}
