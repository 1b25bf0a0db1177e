//! Content codings and CORS: what a replay must adapt to the client that asks.

use async_compression::tokio::bufread::{BrotliEncoder, GzipDecoder, GzipEncoder};
use tokio::io::AsyncReadExt as _;

use crate::support::client::Answer;
use crate::support::upstream::Reply;

const TEXT: &str = "The same words again and again and again and again and again and again.";

async fn gzip(text: &str) -> Vec<u8> {
    let mut coded = Vec::new();
    let mut encoder = GzipEncoder::new(text.as_bytes());
    encoder.read_to_end(&mut coded).await.expect("it codes");
    coded
}

async fn brotli(text: &str) -> Vec<u8> {
    let mut coded = Vec::new();
    let mut encoder = BrotliEncoder::new(text.as_bytes());
    encoder.read_to_end(&mut coded).await.expect("it codes");
    coded
}

/// What a client makes of an answer by its label.
async fn readable(answer: &Answer) -> String {
    match answer.header("content-encoding").as_deref() {
        None | Some("identity") => answer.text(),
        Some("gzip") => {
            let mut text = String::new();
            let mut decoder = GzipDecoder::new(&answer.body[..]);
            decoder
                .read_to_string(&mut text)
                .await
                .expect("it is gzip as its label says");
            text
        }
        other => panic!("no client asked for {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_cannot_take_the_stored_coding_gets_identity() {
    let bench = super::on_sqlite().await;
    let coded = |coding: &str, body: Vec<u8>| {
        Reply::new(200)
            .header("Content-Type", "text/plain")
            .header("Content-Encoding", coding)
            .header("Vary", "Accept-Encoding")
            .body(body)
    };
    bench
        .upstream
        .on_post("/gzip")
        .reply(coded("gzip", gzip(TEXT).await));
    bench
        .upstream
        .on_post("/br")
        .reply(coded("br", brotli(TEXT).await));
    let gateway = bench.gateway().start().await;
    for (path, coding) in [("/gzip", "gzip"), ("/br", "br")] {
        let call = gateway.post(path).key(path);
        let first = call.clone().header("Accept-Encoding", coding).send().await;
        first.assert_is(200, "executed");
        assert_eq!(first.header("content-encoding").as_deref(), Some(coding));
        let again = call.clone().header("Accept-Encoding", coding).send().await;
        again.assert_is(200, "replayed");
        assert_eq!((again.kept(), &again.body), (first.kept(), &first.body));
        for accepts in ["identity", "gzip;q=0, br;q=0", "deflate", "*;q=0, identity"] {
            let plain = call.clone().header("Accept-Encoding", accepts).send().await;
            plain.assert_is(200, "replayed");
            assert_eq!(readable(&plain).await, TEXT, "{accepts}");
            let length = TEXT.len().to_string();
            assert_eq!(plain.header("content-length"), Some(length));
            assert!(
                plain
                    .header("content-encoding")
                    .is_none_or(|label| label == "identity")
            );
        }
        let wild = call.clone().header("Accept-Encoding", "*").send().await;
        wild.assert_is(200, "replayed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_without_a_coding_is_good_for_all() {
    let bench = super::on_sqlite().await;
    bench.upstream.on_post("/pay").answer(200, TEXT);
    let gateway = bench.gateway().start().await;
    let call = gateway.post("/pay").key("k");
    call.clone().send().await.assert_is(200, "executed");
    let again = call.header("Accept-Encoding", "gzip").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(readable(&again).await, TEXT);
}

/// A label that the bytes do not bear out is passed on as it came: nobody could do better, and a
/// retry gets the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coding_that_nobody_knows_is_given_as_it_came() {
    let bench = super::on_sqlite().await;
    let reply = Reply::new(200)
        .header("Content-Encoding", "x-own")
        .body("opaque");
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let call = gateway
        .post("/pay")
        .key("k")
        .header("Accept-Encoding", "x-own");
    let first = call.clone().send().await;
    let again = call.send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.kept(), first.kept());
    assert_eq!(again.text(), "opaque");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cors_headers_are_told_to_their_origin_only() {
    let bench = super::on_sqlite().await;
    let reply = Reply::new(200)
        .header("Access-Control-Allow-Origin", "https://a.test")
        .header("Access-Control-Allow-Credentials", "true")
        .header("Vary", "Origin");
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let call = gateway.post("/pay").key("k");
    let allowed = "access-control-allow-origin";
    let first = call.clone().header("Origin", "https://a.test").send().await;
    first.assert_is(200, "executed");
    assert_eq!(first.header_lines(allowed), ["https://a.test"]);
    let same = call.clone().header("Origin", "https://a.test").send().await;
    same.assert_is(200, "replayed");
    assert_eq!(same.header_lines(allowed), ["https://a.test"]);
    let other = call.clone().header("Origin", "https://b.test").send().await;
    other.assert_is(200, "replayed");
    assert_eq!(other.header_lines(allowed), [""; 0]);
    assert!(other.header("access-control-allow-credentials").is_none());
    let none = call.send().await;
    none.assert_is(200, "replayed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_form_reaches_the_upstream_unharmed() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let file: Vec<u8> = (0..5_000_000_u32)
        .map(|n| n.to_le_bytes()[usize::from(n % 2 == 0)])
        .collect();
    let mut body =
        b"--x\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\n".to_vec();
    body.extend_from_slice(&file);
    body.extend_from_slice(b"\r\n--x--\r\n");
    let call = gateway
        .post("/pay")
        .body("multipart/form-data; boundary=x", &body);
    call.clone()
        .key("a")
        .send()
        .await
        .assert_is(200, "executed");
    call.key("b")
        .chunked()
        .send()
        .await
        .assert_is(200, "executed");
    for seen in bench.upstream.requests() {
        assert!(
            seen.body == body,
            "{} of {} bytes",
            seen.body.len(),
            body.len()
        );
    }
}
