//! What must hold however the two sides' steps interleave: nothing runs twice, and what is told
//! to be not sent did not run. Each call has a key of its own.

use super::*;

/// What a call ended in.
enum End {
    Answered,
    Told(Sent),
}

fn keyed(key: usize) -> Request<OutBody> {
    let mut request = post("/p");
    let key = format!("k{key}").parse().unwrap();
    request.headers_mut().insert("idempotency-key", key);
    request
}

fn check(upstreams: &[&Upstream], key: usize, end: &End) {
    let key = format!("k{key}");
    let executions = upstreams.iter().map(|upstream| upstream.executions(&key));
    let executions: usize = executions.sum();
    match end {
        End::Answered => assert_eq!(executions, 1, "{key}"),
        End::Told(Sent::No) => assert_eq!(executions, 0, "{key}"),
        End::Told(Sent::Maybe) => assert!(executions <= 1, "{key}"),
    }
}

async fn call(pool: &Pool, key: usize) -> End {
    match pool.send(keyed(key)).await {
        Ok(response) => match read(response).await {
            Ok(_) => End::Answered,
            Err(_) => End::Told(Sent::Maybe),
        },
        Err(error) => End::Told(error.sent),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_closes_after_each_answer_without_saying_so_runs_nothing_twice() {
    let (one, two) = (Upstream::start().await, Upstream::start().await);
    let pool = Pool::to(&[&one, &two]);
    for cut in [Cut::Fin, Cut::Rst] {
        for upstream in [&one, &two] {
            let closes = Reply::new(200).cut_after(usize::MAX, cut);
            upstream.on_post("/p").reply(closes);
        }
        for key in 0..300 {
            let key = key + if cut == Cut::Fin { 0 } else { 1000 };
            let end = call(&pool, key).await;
            check(&[&one, &two], key, &end);
        }
    }
    pool.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_closes_what_it_accepts_runs_nothing_that_was_not_sent() {
    let (one, two) = (Upstream::start().await, Upstream::start().await);
    let pool = Pool::to(&[&one, &two]);
    for key in 0..200 {
        for upstream in [&one, &two] {
            upstream.break_next_accept(if key % 2 == 0 { Cut::Fin } else { Cut::Rst });
        }
        let end = call(&pool, key).await;
        check(&[&one, &two], key, &end);
    }
    pool.end().await;
}

/// Gives each call up at the very moment in which its first byte is about to be written. Of those
/// that were not sent none may run, also not later.
async fn give_up_at_the_first_byte(upstream: Upstream, http2: bool) {
    let pool = Pool::with(&[&upstream], |config| config.http2 = http2);
    let mut ends = Vec::new();
    for key in 0..400 {
        let (reach, reached) = std::sync::mpsc::sync_channel(1);
        let progress = SendProgress::only_if(move || {
            let _ = reach.send(());
            spin(key % 20);
            true
        });
        let of_call = progress.clone();
        let upstreams = pool.upstreams.clone();
        let task = pool.tracker.spawn(async move {
            let _ = upstreams.send(&pool_id(), keyed(key), &of_call).await;
        });
        let giving_up = pool.tracker.spawn_blocking(move || {
            reached.recv().unwrap();
            spin(key % 17);
            progress.abandon()
        });
        ends.push(End::Told(giving_up.await.unwrap()));
        task.abort();
        let _ = task.await;
    }
    // Whatever was under way is over when a last call was served and the connections are closed.
    assert!(matches!(call(&pool, 1000).await, End::Answered));
    pool.end().await;
    upstream.until(|state| state.open == 0).await;
    for (key, end) in ends.iter().enumerate() {
        check(&[&upstream], key, end);
    }
}

/// Passes a little time.
fn spin(times: usize) {
    for _ in 0..times * 100 {
        std::hint::spin_loop();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_was_given_up_unsent_never_runs() {
    give_up_at_the_first_byte(Upstream::start().await, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_was_given_up_unsent_never_runs_over_http2() {
    give_up_at_the_first_byte(Upstream::start_http2().await, true).await;
}
