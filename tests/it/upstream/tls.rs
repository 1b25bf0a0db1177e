//! TLS, and the protocol that it agrees on.

use std::path::Path;

use oncegate::upstream::UpstreamError;

use super::*;
use crate::support::upstream::Authority;

fn trusting(upstream: &Upstream, ca: &Path) -> Pool {
    Pool::with(&[upstream], |config| config.ca = Some(ca.to_owned()))
}

#[tokio::test]
async fn the_protocol_that_both_sides_speak_is_spoken() {
    let authority = Authority::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    authority.write_pem(file.path());
    for (alpn, version, connections) in [
        (&["h2", "http/1.1"][..], http::Version::HTTP_2, 1),
        (&["http/1.1"], http::Version::HTTP_11, 8),
        (&[], http::Version::HTTP_11, 8),
    ] {
        let upstream = Upstream::start_tls(&authority, alpn).await;
        let pool = trusting(&upstream, file.path());
        let response = pool.post("/p").await.unwrap();
        assert_eq!(response.version(), version);
        assert_eq!(text(response).await, "{\"execution\":1}");
        pool.answer("/p").await;
        assert_eq!(upstream.connections(), 1);
        let gate = crate::support::upstream::Gate::closed();
        upstream.on_post("/held").reply(Reply::new(200).hold(&gate));
        let calls = futures_util::future::join_all((0..8).map(|_| pool.answer("/held")));
        let opens = async {
            upstream
                .until(|state| state.executions_at("/held") == 8)
                .await;
            gate.open();
        };
        tokio::join!(calls, opens);
        assert_eq!(upstream.connections(), connections);
        pool.end().await;
    }
}

#[tokio::test]
async fn idle_connections_that_the_upstream_closed_are_not_seen_by_anyone() {
    let authority = Authority::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    authority.write_pem(file.path());
    let upstream = Upstream::start_tls(&authority, &["http/1.1"]).await;
    let pool = trusting(&upstream, file.path());
    for cut in [Cut::Fin, Cut::Rst] {
        pool.answer("/p").await;
        upstream.cut_idle(cut).await;
        pool.answer("/p").await;
    }
    assert_eq!(upstream.executions("k"), 4);
    upstream
        .on_post("/p")
        .reply(Reply::new(200).cut_after(0, Cut::Rst));
    let (sent, _) = pool.fails("/p").await;
    assert_eq!((sent, upstream.executions("k")), (Sent::Maybe, 5));
    pool.end().await;
}

/// RFC 9112 section 9.8: without TLS's own goodbye anybody on the way can have cut it.
#[tokio::test]
async fn a_body_that_ends_with_its_connection_is_whole_only_if_tls_says_so() {
    let authority = Authority::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    authority.write_pem(file.path());
    let upstream = Upstream::start_tls(&authority, &["http/1.1"]).await;
    let pool = trusting(&upstream, file.path());
    let answer = "HTTP/1.1 200 OK\r\n\r\nto the end";
    let cut = |cut| Reply::raw(answer).cut_after(answer.len(), cut);
    upstream.on_post("/p").once().reply(cut(Cut::Fin));
    assert_eq!(text(pool.post("/p").await.unwrap()).await, "to the end");
    upstream.on_post("/p").once().reply(cut(Cut::FinBelowTls));
    let response = pool.post("/p").await.unwrap();
    assert_eq!(response.status(), 200);
    read(response).await.unwrap_err();
    pool.end().await;
}

#[tokio::test]
async fn an_upgrade_gets_http1_where_http2_is_spoken() {
    let authority = Authority::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    authority.write_pem(file.path());
    let upstream = Upstream::start_tls(&authority, &["h2", "http/1.1"]).await;
    let pool = trusting(&upstream, file.path());
    pool.answer("/p").await;
    upstream.on_get("/ws").reply(Reply::switch("websocket"));
    let upgrade = Request::get("/ws")
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .body(OutBody::Full(Bytes::new()))
        .unwrap();
    let mut response = pool.send(upgrade).await.unwrap();
    assert_eq!(response.status(), 101);
    super::requests::echoes(&mut response).await;
    pool.end().await;
}

#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_not_sent_to() {
    let (authority, other) = (Authority::new(), Authority::new());
    let file = tempfile::NamedTempFile::new().unwrap();
    other.write_pem(file.path());
    let upstream = Upstream::start_tls(&authority, &["h2", "http/1.1"]).await;
    let pool = trusting(&upstream, file.path());
    assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::Tls));
    assert_eq!(upstream.requests().len(), 0);
    pool.end().await;
}

#[tokio::test]
async fn a_certificate_for_another_name_is_not_sent_to() {
    let authority = Authority::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    authority.write_pem(file.path());
    let upstream = Upstream::start_tls(&authority, &["h2", "http/1.1"]).await;
    let pool = Pool::with(&[&upstream], |config| {
        config.ca = Some(file.path().to_owned());
        config.targets = vec![format!("https://{}", upstream.address()).parse().unwrap()];
    });
    assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::Tls));
    pool.end().await;
}

#[tokio::test]
async fn an_upstream_that_never_answers_the_handshake_was_sent_nothing() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = config(&[format!("https://{}", silent.local_addr().unwrap())]);
    config.connect_timeout = SHORT;
    let authority = Authority::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    authority.write_pem(file.path());
    config.ca = Some(file.path().to_owned());
    let pool = Pool::configured(&config);
    let told = pool.fails("/p").await;
    assert_eq!(told, (Sent::No, SendErrorKind::ConnectTimeout));
    pool.end().await;
}

#[tokio::test]
async fn what_cannot_be_used_is_told_at_the_start() {
    let with = |target: &str, ca: Option<&Path>| {
        let mut config = config(&[target.to_owned()]);
        config.ca = ca.map(Path::to_owned);
        Upstreams::new(&[config], TaskTracker::new()).err()
    };
    let empty = tempfile::NamedTempFile::new().unwrap();
    let missing = Path::new("no-such-file.pem");
    for path in [empty.path(), missing] {
        let error = with("https://localhost:1", Some(path)).unwrap();
        assert!(matches!(error, UpstreamError::Ca { .. }), "{error}");
        assert!(error.to_string().contains(path.to_str().unwrap()));
    }
    for target in ["ftp://localhost", "/path", "http://user:secret@localhost"] {
        let error = with(target, None).unwrap();
        assert!(matches!(error, UpstreamError::Target { .. }), "{error}");
    }
}
