//! Requests whose end is in doubt: each gets 400 and the end of its connection, and none reaches a
//! handler (RFC 9112 sections 6 and 11.2).

use tokio::io::AsyncWriteExt;

use super::server::Server;

const BODY: &str = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";

/// Heads that are refused, each as the lines after the request line.
const DOUBTFUL: &[&str] = &[
    // Two framings.
    "Host: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 6\r\n",
    "Host: a\r\ncontent-length: 0\r\nTRANSFER-ENCODING: chunked\r\n",
    "Host: a\r\nContent-Length: 6\r\nX: y\r\nTransfer-Encoding: Chunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: x\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length:\r\n",
    // Lengths.
    "Host: a\r\nContent-Length: 6\r\nContent-Length: 5\r\n",
    "Host: a\r\nContent-Length: 6\r\nContent-Length: 6\r\n",
    "Host: a\r\nContent-Length: 6, 5\r\n",
    "Host: a\r\nContent-Length: 6,6\r\n",
    "Host: a\r\nContent-Length: +6\r\n",
    "Host: a\r\nContent-Length: -6\r\n",
    "Host: a\r\nContent-Length: 0x6\r\n",
    "Host: a\r\nContent-Length: 6 6\r\n",
    "Host: a\r\nContent-Length: 6.0\r\n",
    "Host: a\r\nContent-Length: \"6\"\r\n",
    "Host: a\r\nContent-Length:\r\n",
    "Host: a\r\nContent-Length: 18446744073709551616\r\n",
    "Host: a\r\nContent-Length\r\n: 6\r\n",
    // Codings.
    "Host: a\r\nTransfer-Encoding: identity\r\n",
    "Host: a\r\nTransfer-Encoding: gzip\r\n",
    "Host: a\r\nTransfer-Encoding: gzip, chunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunked, gzip\r\n",
    "Host: a\r\nTransfer-Encoding: chunked, identity\r\n",
    "Host: a\r\nTransfer-Encoding: chunked, chunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "Host: a\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
    "Host: a\r\nTransfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n",
    "Host: a\r\nTransfer-Encoding: xchunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunkedx\r\n",
    "Host: a\r\nTransfer-Encoding: \"chunked\"\r\n",
    "Host: a\r\nTransfer-Encoding: 'chunked'\r\n",
    "Host: a\r\nTransfer-Encoding: chunked;q=1\r\n",
    "Host: a\r\nTransfer-Encoding: chun\u{212a}ed\r\n",
    "Host: a\r\nTransfer-Encoding:\r\n",
    "Host: a\r\nTransfer-Encoding: ,chunked\r\n",
    // Names and lines that one parser takes and another does not.
    "Host: a\r\nTransfer-Encoding : chunked\r\n",
    "Host: a\r\nTransfer-Encoding\t: chunked\r\n",
    "Host: a\r\n Transfer-Encoding: chunked\r\n",
    "Host: a\r\nTransfer-Encoding:\r\n chunked\r\n",
    "Host: a\r\nTransfer-Encoding:\x0bchunked\r\n",
    "Host: a\r\nTransfer-Encoding: \x0cchunked\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\x00\r\n",
    "Host: a\r\nTransfer-Encoding: chunked\n",
    "Host: a\nTransfer-Encoding: chunked\r\n",
    "Host: a\r\nX: y\rTransfer-Encoding: chunked\r\n",
    "Host: a\r\nX: y\nTransfer-Encoding: chunked\r\n",
    "Host: a\r\nX: y\r\n\rTransfer-Encoding: chunked\r\n",
    "Host: a\r\nContent-Length : 6\r\n",
    "Host: a\r\n Content-Length: 6\r\n",
    "Host: a\r\nX: y\r\n folded\r\n",
    "Host: a\r\nX: y\r\n\tfolded\r\n",
    " Host: a\r\n",
    "Host: a\r\n: empty\r\n",
    "Host: a\r\nNo colon\r\n",
    "Host: a\r\nX: a\x00b\r\n",
    "Host: a\r\nX\x00: b\r\n",
    "Host: a\r\nX(y): b\r\n",
    "Host: a\r\nX\u{e9}: b\r\n",
    // The authority.
    "X: y\r\n",
    "Host: a\r\nHost: b\r\n",
    "Host: a\r\nHost: a\r\n",
    "Host: a b\r\n",
    "Host: a, b\r\n",
    "Host: a/b\r\n",
    "Host: user@a\r\n",
    "Host: a:x\r\n",
];

async fn refused(bytes: &str) {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.send(bytes).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 400, "{bytes:?}: {answer:?}");
    assert_eq!(answer.header("connection"), ["close"], "{bytes:?}");
    let rest = client.rest().await;
    assert_eq!(String::from_utf8_lossy(&rest), "", "{bytes:?}");
    assert_eq!(server.calls(), 0, "{bytes:?}");
}

#[tokio::test]
async fn a_request_whose_end_is_in_doubt_is_refused_and_its_connection_closed() {
    for fields in DOUBTFUL {
        refused(&format!("POST / HTTP/1.1\r\n{fields}\r\n{BODY}")).await;
    }
}

#[tokio::test]
async fn a_request_line_that_parsers_read_differently_is_refused() {
    let fields = "Host: a\r\n\r\n";
    for line in [
        "GET / HTTP/1.1\n",
        "GET  / HTTP/1.1\r\n",
        "GET /  HTTP/1.1\r\n",
        "GET\t/ HTTP/1.1\r\n",
        "GET / HTTP/1.1 \r\n",
        "GET / HTTP/1.1\r\r\n",
        "GET /a b HTTP/1.1\r\n",
        "GET / HTTP/1.2\r\n",
        "GET / HTTP/2.0\r\n",
        "GET / HTTP/0.9\r\n",
        "GET / http/1.1\r\n",
        "GET / HTTP/1.10\r\n",
        "GET /\r\n",
        " GET / HTTP/1.1\r\n",
        "\nGET / HTTP/1.1\r\n",
        "G<T / HTTP/1.1\r\n",
        "GET / HTTP/1.1\r\nGET / HTTP/1.1\r\n",
        "GET example/ HTTP/1.1\r\n",
        "CONNECT a:80 HTTP/1.1\r\n",
    ] {
        refused(&format!("{line}{fields}")).await;
    }
}

#[tokio::test]
async fn chunks_in_http_1_0_are_refused() {
    refused(&format!(
        "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n{BODY}"
    ))
    .await;
    let both = "Content-Length: 6\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n";
    refused(&format!("POST / HTTP/1.0\r\n{both}\r\n{BODY}")).await;
}

#[tokio::test]
async fn a_sound_request_before_a_doubtful_one_is_served_and_nothing_after_it() {
    let sound = "POST /sound HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello";
    let chunked = "POST /chunked HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\
        3;x=y\r\nabc\r\n0\r\nTrailer: t\r\n\r\n";
    let after = "GET /after HTTP/1.1\r\nHost: a\r\n\r\n";
    for fields in DOUBTFUL {
        let doubtful = format!("POST /doubtful HTTP/1.1\r\n{fields}\r\n{BODY}");
        let bytes = format!("{sound}{chunked}{doubtful}{after}");
        let server = Server::start().await;
        let mut client = server.connect().await;
        client.send(&bytes).await;
        assert_eq!(client.answer().await.text(), "POST /sound 5", "{fields:?}");
        assert_eq!(
            client.answer().await.text(),
            "POST /chunked 3",
            "{fields:?}"
        );
        let answer = client.answer().await;
        assert_eq!(answer.status, 400, "{fields:?}");
        assert_eq!(answer.header("connection"), ["close"], "{fields:?}");
        assert_eq!(client.rest().await, b"", "{fields:?}");
        assert_eq!(server.calls(), 2, "{fields:?}");
    }
}

#[tokio::test]
async fn a_doubtful_request_is_refused_however_it_is_split() {
    let doubtful = format!("POST / HTTP/1.1\r\n{}\r\n{BODY}", DOUBTFUL[1]);
    for at in 1..doubtful.len() {
        let server = Server::start().await;
        let mut client = server.connect().await;
        client.stream.set_nodelay(true).unwrap();
        client.send(&doubtful[..at]).await;
        tokio::task::yield_now().await;
        // By then the answer may be there and the connection closed.
        let _ = client.stream.write_all(&doubtful.as_bytes()[at..]).await;
        assert_eq!(client.answer().await.status, 400, "split at {at}");
        assert_eq!(server.calls(), 0, "split at {at}");
    }
}

#[tokio::test]
async fn a_body_whose_chunks_are_in_doubt_is_never_taken_for_whole() {
    for chunks in [
        "5\nhello\r\n0\r\n\r\n",
        "5\r\nhello0\r\n\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "5\r\nhello\r0\r\n\r\n",
        "5\rhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "+5\r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "5g\r\nhello\r\n0\r\n\r\n",
        "\r\n0\r\n\r\n",
        "5;x\ny\r\nhello\r\n0\r\n\r\n",
        "5;x\ry\r\nhello\r\n0\r\n\r\n",
        "ffffffffffffffff5\r\nhello\r\n0\r\n\r\n",
        "fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello\r\n0\r\nTrailer: t\n\r\n",
        "5\r\nhello\r\n0\r\n\n",
        "5\r\nhello\r\n0\n\r\n",
        "5\r\nhello\r\n0\r\nTransfer-Encoding : x\r\n\r\n",
    ] {
        let server = Server::start().await;
        let mut client = server.connect().await;
        let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        let smuggled = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
        client.send(format!("{head}{chunks}{smuggled}")).await;
        let rest = String::from_utf8_lossy(&client.rest().await).into_owned();
        assert!(!rest.contains("200 OK"), "{chunks:?}: {rest}");
        assert!(server.calls() <= 1, "{chunks:?}");
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_never_taken_for_whole() {
    for request in [
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nhello",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    ] {
        let server = Server::start().await;
        let mut client = server.connect().await;
        client.send(request).await;
        client.stream.shutdown().await.unwrap();
        let rest = String::from_utf8_lossy(&client.rest().await).into_owned();
        assert!(!rest.contains("200 OK"), "{request:?}: {rest}");
    }
}
