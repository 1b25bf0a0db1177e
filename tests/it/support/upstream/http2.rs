//! HTTP/2, by the `h2` crate; GOAWAY by hand, since that crate sends true ones only.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use h2::Reason;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use super::http1::Socket;
use super::reply::{Piece, Reply, Reset};
use super::{Counted, GoAway, Seen, Shared};

pub(super) async fn serve(
    mut io: impl Socket,
    counted: Counted,
    number: usize,
    streams_max: Option<u32>,
) {
    let shared = counted.shared.clone();
    let goaway = shared.script.lock().unwrap().goaways.pop_front();
    if let Some(goaway) = goaway {
        // A client that closes first is no failure of ours.
        let _ = go_away(&mut io, goaway, &shared).await;
        return;
    }
    let mut builder = h2::server::Builder::new();
    if let Some(streams_max) = streams_max {
        builder.max_concurrent_streams(streams_max);
    }
    let Ok(mut connection) = builder.handshake::<_, Bytes>(io).await else {
        return;
    };
    let mut streams = JoinSet::new();
    while let Some(Ok((request, respond))) = connection.accept().await {
        streams.spawn(stream(shared.clone(), request, respond, number));
    }
}

async fn stream(
    shared: Arc<Shared>,
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
    number: usize,
) {
    let (parts, mut body) = request.into_parts();
    let reply = shared.reply(parts.method.as_str(), parts.uri.path());
    if reply.reset == Some(Reset::Refused) {
        shared.update(|state| state.broken += 1);
        respond.send_reset(Reason::REFUSED_STREAM);
        return;
    }
    let authority = parts.uri.authority().map(ToString::to_string);
    let authority = authority.map(|authority| (":authority".to_owned(), authority.into_bytes()));
    let headers = parts.headers.iter();
    let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
    let seen = Seen {
        method: parts.method.to_string(),
        target: parts.uri.path_and_query().unwrap().to_string(),
        headers: authority.into_iter().chain(headers).collect(),
        body: Vec::new(),
        sha256: String::new(),
        connection: number,
        complete: false,
    };
    let mut bytes = Vec::new();
    while let Some(data) = body.data().await {
        let Ok(data) = data else {
            shared.record(seen.finish(bytes, false));
            return;
        };
        let _ = body.flow_control().release_capacity(data.len());
        bytes.extend_from_slice(&data);
    }
    let execution = shared.record(seen.finish(bytes, true));
    if let Some(Reset::Executed(reason)) = reply.reset {
        respond.send_reset(reason);
        return;
    }
    tokio::select! {
        () = reply.wait() => {}
        _ = std::future::poll_fn(|context| respond.poll_reset(context)) => return,
    }
    // A client that has gone meanwhile is no failure of ours.
    let _ = answer(&reply, respond, execution).await;
}

async fn answer(
    reply: &Reply,
    mut respond: SendResponse<Bytes>,
    execution: usize,
) -> Result<(), h2::Error> {
    for status in &reply.interim {
        let interim = Response::builder().status(*status).body(()).unwrap();
        respond.send_informational(interim)?;
    }
    let mut response = Response::builder().status(reply.status).body(()).unwrap();
    *response.headers_mut() = map(&reply.headers);
    let Some(pieces) = &reply.pieces else {
        let mut send = respond.send_response(response, false)?;
        let trailers = !reply.trailers.is_empty();
        send.send_data(reply.body_of(execution), !trailers)?;
        if trailers {
            send.send_trailers(map(&reply.trailers))?;
        }
        return Ok(());
    };
    let pieces = pieces.lock().unwrap().take();
    let mut pieces = pieces.expect("streamed once");
    let mut send = respond.send_response(response, false)?;
    loop {
        let piece = tokio::select! {
            piece = pieces.recv() => piece,
            _ = std::future::poll_fn(|context| send.poll_reset(context)) => return Ok(()),
        };
        match piece {
            Some(Piece::Data(data)) => send.send_data(data, false)?,
            Some(Piece::Reset(reason)) => {
                send.send_reset(reason);
                return Ok(());
            }
            Some(Piece::Cut(_)) => panic!("streams are reset, not cut"),
            Some(Piece::End) | None => return send.send_data(Bytes::new(), true),
        }
    }
}

fn map(lines: &[(String, Vec<u8>)]) -> HeaderMap {
    let lines = lines.iter().map(|(name, value)| {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        (name, HeaderValue::from_bytes(value).unwrap())
    });
    let mut map = HeaderMap::new();
    for (name, value) in lines {
        map.append(name, value);
    }
    map
}

const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const HEADERS: u8 = 1;

/// Answers the first request with GOAWAY (RFC 9113 section 6.8).
async fn go_away(io: &mut impl Socket, goaway: GoAway, shared: &Shared) -> std::io::Result<()> {
    let mut preface = [0; 24];
    io.read_exact(&mut preface).await?;
    io.write_all(&frame(SETTINGS, 0, &[])).await?;
    let stream = loop {
        let mut header = [0; 9];
        io.read_exact(&mut header).await?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; length as usize];
        io.read_exact(&mut payload).await?;
        if header[3] == SETTINGS && header[4] == 0 {
            io.write_all(&frame(SETTINGS, 1, &[])).await?;
        }
        if header[3] == PING && header[4] == 0 {
            io.write_all(&frame(PING, 1, &payload)).await?;
        }
        if header[3] == HEADERS {
            break u32::from_be_bytes([header[5] & 0x7f, header[6], header[7], header[8]]);
        }
    };
    let last = match goaway {
        GoAway::Below => stream.saturating_sub(2),
        GoAway::Covering => stream,
    };
    let mut payload = last.to_be_bytes().to_vec();
    payload.extend_from_slice(&u32::from(Reason::NO_ERROR).to_be_bytes());
    shared.update(|state| state.broken += 1);
    io.write_all(&frame(GOAWAY, 0, &payload)).await?;
    io.shutdown().await?;
    // Closing with unread bytes would send RST, which could overtake the frame.
    let mut sink = [0; 4096];
    while matches!(io.read(&mut sink).await, Ok(1..)) {}
    Ok(())
}

/// A frame of the connection, on stream 0.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> BytesMut {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = BytesMut::new();
    frame.extend_from_slice(&length[1..]);
    frame.extend_from_slice(&[kind, flags, 0, 0, 0, 0]);
    frame.extend_from_slice(payload);
    frame
}
