use proptest::prelude::*;

use super::*;

/// The verdict on one head, and how many heads there were.
fn verdict(head: &str) -> (Option<Fault>, u64) {
    let mut scanner = Scanner::new();
    assert_eq!(scanner.scan(head.as_bytes()), Ok(()));
    (scanner.fault_of(scanner.heads()), scanner.heads())
}

#[test]
fn a_head_whose_framing_is_in_doubt_is_at_fault() {
    let both = Fault::BothLengths;
    let coding = Fault::TransferEncoding;
    let length = Fault::ContentLength;
    for (fields, fault) in [
        ("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", both),
        ("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", both),
        ("TRANSFER-ENCODING: chunked\r\ncontent-length: 0\r\n", both),
        ("Transfer-Encoding: x\r\nContent-Length: 4\r\n", both),
        ("Transfer-Encoding: gzip, chunked\r\n", coding),
        ("Transfer-Encoding: chunked, gzip\r\n", coding),
        ("Transfer-Encoding: identity\r\n", coding),
        ("Transfer-Encoding: xchunked\r\n", coding),
        ("Transfer-Encoding: chunked;q=1\r\n", coding),
        ("Transfer-Encoding: \"chunked\"\r\n", coding),
        ("Transfer-Encoding:\r\n", coding),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            coding,
        ),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n",
            coding,
        ),
        (
            "Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n",
            coding,
        ),
        (
            "Transfer-Encoding:                                                  chunked\r\n",
            coding,
        ),
        ("Content-Length: 4\r\nContent-Length: 5\r\n", length),
        ("Content-Length: 4\r\nContent-Length: 4\r\n", length),
        ("Content-Length: 4, 4\r\n", length),
        ("Content-Length: +4\r\n", length),
        ("Content-Length: -4\r\n", length),
        ("Content-Length: 0x4\r\n", length),
        ("Content-Length: 4 4\r\n", length),
        ("Content-Length:\r\n", length),
        ("Content-Length: 99999999999999999999\r\n", length),
        ("X: y\n", Fault::BareLf),
        ("X: y\r\n\n", Fault::BareLf),
    ] {
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        assert_eq!(verdict(&head).0, Some(fault), "{fields:?}");
    }
    assert_eq!(verdict("\nGET / HTTP/1.1\r\n\r\n").0, Some(Fault::BareLf));
    assert_eq!(
        verdict("GET / HTTP/1.1\nA: b\r\n\r\n").0,
        Some(Fault::BareLf)
    );
}

#[test]
fn what_only_looks_like_framing_is_no_fault() {
    for fields in [
        "Transfer-Encoding:chunked\r\n",
        "Transfer-Encoding:\t Chunked \t\r\n",
        "X-Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 0004\r\n",
        "X: Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
    ] {
        let head = format!("POST / HTTP/1.1\r\n{fields}\r\n");
        assert_eq!(verdict(&head), (None, 1), "{fields:?}");
    }
}

#[test]
fn a_chunked_body_in_doubt_breaks_the_connection() {
    for body in [
        "5\nhello\r\n0\r\n\r\n",
        "\r\n5\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello!\r\n0\r\n\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "x\r\n",
        "0000000000000005\r\nhello\r\n",
        "ffffffffffffffff\r\n",
        "5;a\nb\r\nhello\r\n0\r\n\r\n",
        "0\r\nTrailer: x\n\r\n",
        "0\r\n\n",
    ] {
        let mut scanner = Scanner::new();
        let head = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(scanner.scan(head.as_bytes()), Ok(()));
        assert!(scanner.scan(body.as_bytes()).is_err(), "{body:?}");
        assert_eq!(scanner.fault_of(0), None, "the request itself was sound");
        assert!(scanner.fault_of(1).is_some(), "{body:?}");
    }
}

#[test]
fn nothing_is_looked_at_after_an_upgrade_or_in_http2() {
    let mut scanner = Scanner::new();
    let head = "GET / HTTP/1.1\r\nUpgrade: x\r\n\r\n";
    assert_eq!(scanner.scan(head.as_bytes()), Ok(()));
    scanner.upgrade();
    assert_eq!(scanner.scan(b"\n\nContent-Length: x\n\n"), Ok(()));
    assert_eq!((scanner.fault_of(1), scanner.in_head()), (None, false));

    let mut scanner = Scanner::new();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\n\nTransfer-Encoding: x\n";
    assert_eq!(scanner.scan(preface), Ok(()));
    assert_eq!((scanner.fault_of(0), scanner.in_head()), (None, false));
}

/// A valid request with a random body.
fn request() -> impl Strategy<Value = Vec<u8>> {
    let body = proptest::collection::vec(any::<u8>(), 0..40);
    let chunks = proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..20), 0..4);
    let with_length = body.prop_map(|body| {
        let head = format!("PUT /x HTTP/1.1\r\ncontent-length: {}\r\n\r\n", body.len());
        [head.as_bytes(), &body].concat()
    });
    let chunked = (chunks, any::<bool>()).prop_map(|(chunks, trailer)| {
        let mut bytes = b"\r\nPOST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for chunk in chunks {
            bytes.extend_from_slice(format!("{:x};ext=\"1\"\r\n", chunk.len()).as_bytes());
            bytes.extend_from_slice(&chunk);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(if trailer {
            b"0\r\na: b\r\n\r\n"
        } else {
            b"0\r\n\r\n"
        });
        bytes
    });
    let bare = Just(b"GET /x?content-length:4 HTTP/1.1\r\nhost: a\r\n\r\n".to_vec());
    prop_oneof![with_length, chunked, bare]
}

proptest! {
    #[test]
    fn valid_requests_are_counted_however_they_are_split(
        requests in proptest::collection::vec(request(), 1..6),
        cuts in proptest::collection::vec(1usize..30, 1..40),
    ) {
        let bytes = requests.concat();
        let mut scanner = Scanner::new();
        let mut rest = &bytes[..];
        for cut in cuts.iter().cycle() {
            let (piece, more) = rest.split_at((*cut).min(rest.len()));
            prop_assert_eq!(scanner.scan(piece), Ok(()));
            rest = more;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(scanner.heads(), requests.len() as u64);
        prop_assert_eq!(scanner.fault_of(u64::MAX), None);
        prop_assert!(scanner.is_between_messages());
    }
}
