//! The scanner against hyper itself: whatever bytes come, the two agree about every request that
//! is served.

use std::collections::VecDeque;
use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use proptest::prelude::*;

use super::*;

const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// A client that sends these pieces one by one, closes its side, and takes whatever comes.
struct Script(VecDeque<Vec<u8>>);

impl Script {
    fn new(bytes: &[u8], cuts: &[usize]) -> Self {
        let mut rest = bytes;
        let mut pieces = VecDeque::new();
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, more) = rest.split_at((*cut).clamp(1, rest.len()));
            pieces.push_back(piece.to_vec());
            rest = more;
        }
        Self(pieces)
    }
}

impl AsyncRead for Script {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(mut piece) = self.0.pop_front() {
            let rest = piece.split_off(piece.len().min(buf.remaining()));
            buf.put_slice(&piece);
            if !rest.is_empty() {
                self.0.push_front(rest);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// What hyper made of one request that the scanner did not refuse.
#[derive(Debug)]
struct Served {
    number: u64,
    target: String,
    body: Option<Vec<u8>>,
}

/// Lets hyper serve the bytes from behind the scanner, as the listener does.
async fn serve(bytes: &[u8], cuts: &[usize]) -> Vec<Served> {
    let watch = Watch::new();
    let io = ClientIo::new(Script::new(bytes, cuts), watch.clone(), HEAD_TIMEOUT);
    let served = Arc::new(Mutex::new(Vec::new()));
    let number = std::cell::Cell::new(0);
    let service = service_fn(|request: Request<Incoming>| {
        let this = number.replace(number.get() + 1);
        let refused = watch.scanner().fault_of(this).is_some();
        let served = Arc::clone(&served);
        async move {
            let target = request.uri().to_string();
            if !refused {
                let body = request.into_body().collect().await;
                served.lock().unwrap().push(Served {
                    number: this,
                    target,
                    body: body.ok().map(|body| body.to_bytes().to_vec()),
                });
            }
            let mut response = Response::new(Empty::<Bytes>::new());
            if refused {
                let close = http::HeaderValue::from_static("close");
                response.headers_mut().insert("connection", close);
            }
            Ok::<_, Infallible>(response)
        }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.half_close(true).header_read_timeout(None);
    let _ = http.serve_connection(TokioIo::new(io), service).await;
    Arc::try_unwrap(served).unwrap().into_inner().unwrap()
}

/// One message as the scanner saw it.
#[derive(Debug, Default)]
struct Message {
    head: Vec<u8>,
    body: Vec<u8>,
    complete: bool,
}

/// Where the scanner sees messages begin and end.
fn scan(bytes: &[u8]) -> Vec<Message> {
    let mut scanner = Scanner::new();
    let mut messages = Vec::new();
    let mut head = Vec::new();
    for byte in bytes {
        let heads = scanner.heads();
        let in_body = !scanner.is_between_messages() && !scanner.in_head();
        if scanner.scan(&[*byte]).is_err() {
            break;
        }
        if in_body {
            let last: &mut Message = messages.last_mut().unwrap();
            last.body.push(*byte);
            last.complete = scanner.is_between_messages();
        } else {
            head.push(*byte);
        }
        if scanner.heads() > heads {
            messages.push(Message {
                head: std::mem::take(&mut head),
                body: Vec::new(),
                complete: scanner.is_between_messages(),
            });
        }
        if scanner.fault_of(scanner.heads()).is_some() {
            break;
        }
    }
    messages
}

/// The data of a complete chunked body that the scanner found sound.
fn dechunked(mut body: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    loop {
        let end = body.windows(2).position(|pair| pair == b"\r\n").unwrap();
        let line = std::str::from_utf8(&body[..end]).unwrap();
        let digits = line.trim_end_matches(|c: char| !c.is_ascii_hexdigit());
        let digits = digits.split([';', ' ', '\t']).next().unwrap();
        let size = usize::from_str_radix(digits, 16).unwrap();
        if size == 0 {
            return data;
        }
        data.extend_from_slice(&body[end + 2..end + 2 + size]);
        body = &body[end + 4 + size..];
    }
}

/// Checks every request that was served against the scanner's view.
fn agree(bytes: &[u8], served: &[Served]) {
    let messages = scan(bytes);
    let text = String::from_utf8_lossy(bytes);
    for request in served {
        let seen = usize::try_from(request.number).ok();
        let seen = seen.and_then(|number| messages.get(number));
        let Some(message) = seen else {
            panic!("hyper served {request:?}, which the scanner never saw, of {text:?}");
        };
        let head = String::from_utf8_lossy(&message.head).to_ascii_lowercase();
        let target = format!(" {} http/1.", request.target);
        assert!(
            head.contains(&target),
            "{request:?} is not {head:?} of {text:?}"
        );
        if let Some(body) = &request.body {
            assert!(message.complete, "{request:?} of {text:?}");
            let chunked = head.contains("\r\ntransfer-encoding:");
            let expected = if chunked {
                dechunked(&message.body)
            } else {
                message.body.clone()
            };
            assert_eq!(body, &expected, "{request:?} of {text:?}");
        }
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.unwrap().block_on(future)
}

/// Pieces of requests, sound and not, from RFC 9112 section 6 and from known smuggling attacks.
fn piece() -> impl Strategy<Value = &'static str> {
    let start = prop_oneof![
        Just("GET /# HTTP/1.1\r\n"),
        Just("POST /# HTTP/1.1\r\n"),
        Just("POST /# HTTP/1.1\n"),
        Just("POST /# HTTP/1.0\r\n"),
        Just("HEAD /# HTTP/1.1\r\n"),
    ];
    let field = prop::sample::select(vec![
        "Host: a\r\n",
        "Content-Length: 5\r\n",
        "Content-Length: 0\r\n",
        "Content-Length : 5\r\n",
        "Content-Length:\r\n 5\r\n",
        "content-length:5\n",
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\n",
        "Transfer-Encoding:\tchunked \r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding: x, chunked\r\n",
        "Transfer-Encoding\r\n : chunked\r\n",
        "X: a\rTransfer-Encoding: chunked\r\n",
        "Connection: close\r\n",
        "Connection: keep-alive\r\n",
        "Expect: 100-continue\r\n",
        " X: y\r\n",
        "X: y\0\r\n",
    ]);
    let body = prop::sample::select(vec![
        "hello",
        "5\r\nhello\r\n",
        "5 \r\nhello\r\n",
        "5;a=b\r\nhello\r\n",
        "5\nhello\n",
        "05\r\nhello\r\n",
        "5\r\nhello",
        "\r\n",
        "\n",
        "\r",
        "0\r\n\r\n",
        "0\r\n",
        "00\r\n\r\n",
        "0\r\na: b\r\n\r\n",
        "0\r\na: b\n\r\n",
        "0\r\n\n\r\n",
        "0;\r\n\r\n",
        "0\n\r\n",
        "0\r\n\r",
        "a",
        "fffffffffffffffff\r\n",
        "0x5\r\nhello\r\n",
        "-1\r\n",
        "; \r\n",
    ]);
    prop_oneof![2 => start, 3 => field, 2 => Just("\r\n"), 3 => body]
}

/// A sound request of which one piece may be repeated, left out or exchanged.
fn nearly_sound() -> impl Strategy<Value = Vec<&'static str>> {
    let sound = prop::sample::select(vec![
        vec![
            "POST /# HTTP/1.1\r\n",
            "Content-Length: 5\r\n",
            "\r\n",
            "hello",
        ],
        vec!["GET /# HTTP/1.1\r\n", "Host: a\r\n", "\r\n"],
        vec![
            "POST /# HTTP/1.1\r\n",
            "Transfer-Encoding: chunked\r\n",
            "\r\n",
            "5\r\n",
            "hello",
            "\r\n",
            "0\r\n",
            "a: b\r\n",
            "\r\n",
        ],
    ]);
    (sound, any::<prop::sample::Index>(), piece(), 0..8).prop_map(|(mut pieces, at, piece, how)| {
        let at = at.index(pieces.len());
        match how {
            0 => pieces.insert(at, piece),
            1 => pieces[at] = piece,
            2 => {
                pieces.remove(at);
            }
            3 => pieces.insert(at, pieces[at]),
            _ => {}
        }
        pieces
    })
}

/// Gives every request line a target of its own.
fn numbered(pieces: &[&str]) -> Vec<u8> {
    let numbered = pieces.iter().enumerate();
    let numbered = numbered.map(|(at, piece)| piece.replace('#', &format!("{at}.")));
    numbered.collect::<String>().into_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn hyper_and_the_scanner_agree_on_requests_that_are_nearly_sound(
        requests in prop::collection::vec(nearly_sound(), 1..5),
        cuts in prop::collection::vec(1usize..60, 1..6),
    ) {
        let bytes = numbered(&requests.concat());
        let served = block_on(serve(&bytes, &cuts));
        agree(&bytes, &served);
    }

    #[test]
    fn hyper_and_the_scanner_agree_on_anything(
        pieces in prop::collection::vec(piece(), 1..16),
        cuts in prop::collection::vec(1usize..60, 1..6),
    ) {
        let bytes = numbered(&pieces);
        let served = block_on(serve(&bytes, &cuts));
        agree(&bytes, &served);
    }
}

#[test]
fn sound_requests_are_all_served_one_byte_at_a_time() {
    let bytes = b"POST /a HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello\
        POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nt: x\r\n\r\n\
        GET /c HTTP/1.1\r\n\r\n";
    let served = block_on(serve(bytes, &[1]));
    agree(bytes, &served);
    let bodies: Vec<_> = served
        .iter()
        .map(|request| request.body.clone().unwrap())
        .collect();
    assert_eq!(bodies, [&b"hello"[..], b"abc", b""]);
}

proptest! {
    #[test]
    fn every_byte_passes_unchanged(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        cuts in prop::collection::vec(1usize..40, 1..6),
        upgraded in any::<bool>(),
    ) {
        use tokio::io::AsyncReadExt;
        let watch = Watch::new();
        if upgraded {
            watch.scanner().upgrade();
        }
        let mut io = ClientIo::new(Script::new(&bytes, &cuts), watch.clone(), HEAD_TIMEOUT);
        let mut passed = Vec::new();
        let outcome = block_on(io.read_to_end(&mut passed));
        // Random bytes are no chunked request, so nothing breaks the connection.
        prop_assert!(outcome.is_ok());
        prop_assert_eq!(passed, bytes);
    }
}
