//! Group commit: while one batch commits, the next one gathers.
//!
//! There is no timer. A worker takes whatever has gathered, sends it to the store as one operation
//! and comes back; an idle gateway therefore commits at once, and a busy one in batches that grow
//! with the load.
//!
//! It does not know what the operations mean. Its invariants:
//! - A caller that goes away cancels nothing: what it asked for is done all the same.
//! - A caller that was told [`StoreError::Unavailable`] asked for nothing that is done later.
//! - Queues and batches are bounded by the constants here.
//!
//! A worker waits for its store as long as that takes; a store must bound its own operations.

use std::io;
use std::ops::Deref;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Store, StoreError};
use crate::domain::intent::{End, Finish, Finished};
use crate::domain::record::{
    Claim, Committed, Completion, Heartbeat, Record, Release, Released, Reserved,
};
use crate::domain::run::{TickCommit, TickCommitted};
use crate::domain::scope::RecordKey;
use crate::telemetry::metric::{STORE_ERRORS, STORE_SECONDS};

/// Operations of one kind that may be waiting for their batch.
pub const QUEUE_MAX: usize = 8192;
/// Operations in one batch.
pub const BATCH_MAX: usize = 256;
/// Answers in one batch, in bytes; one that is longer goes alone.
pub const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;

/// How a [`Group`] works.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    /// Batches of one kind that run at once: 1 on SQLite, a few on PostgreSQL.
    pub concurrency: usize,
    /// How long a caller waits, in line and for the store together.
    pub patience: Duration,
}

/// The hot operations of a store, in batches. Clones share their queues.
#[derive(Clone)]
pub struct Group(Arc<Queues>);

/// A queue for each operation.
pub struct Queues {
    /// [`Store::reserve`] of one claim.
    pub reserve: Queue<Claim, Reserved>,
    /// [`Store::heartbeat`] of one owner.
    pub heartbeat: Queue<Heartbeat, bool>,
    /// [`Store::complete`] of one decision.
    pub complete: Queue<Completion, Option<Committed>>,
    /// [`Store::release`] of one record.
    pub release: Queue<Release, Option<Released>>,
    /// [`Store::look_up`] of one record.
    pub look_up: Queue<RecordKey, Option<Record>>,
    /// [`OutboxStore::finish`](super::outbox::OutboxStore::finish) of one try.
    pub finish: Queue<Finish, Finished>,
    /// [`RunStore::commit_ticks`](super::runs::RunStore::commit_ticks) of one tick.
    pub tick: Queue<TickCommit, TickCommitted>,
    workers: TaskTracker,
    closing: CancellationToken,
}

impl Deref for Group {
    type Target = Queues;

    fn deref(&self) -> &Queues {
        &self.0
    }
}

impl Group {
    /// Starts the workers.
    pub fn new(store: &Arc<dyn Store>, options: GroupOptions) -> Self {
        let crew = Crew {
            store: Arc::clone(store),
            options,
            workers: TaskTracker::new(),
            closing: CancellationToken::new(),
        };
        Self(Arc::new(Queues {
            reserve: crew.staff("reserve", |_| 0, |store, claims| store.reserve(claims)),
            heartbeat: crew.staff("heartbeat", |_| 0, |store, beats| store.heartbeat(beats)),
            complete: crew.staff("complete", weight, |store, all| store.complete(all)),
            release: crew.staff("release", |_| 0, |store, all| store.release(all)),
            look_up: crew.staff("look_up", |_| 0, |store, keys| store.look_up(keys)),
            finish: crew.staff("finish", answer_weight, |store, ends| store.finish(ends)),
            tick: crew.staff("tick", tick_weight, |store, ticks| {
                store.commit_ticks(ticks)
            }),
            workers: crew.workers,
            closing: crew.closing,
        }))
    }

    /// Takes nothing more, finishes what is in line and returns when that is done.
    pub async fn close(&self) {
        self.0.closing.cancel();
        self.0.workers.close();
        self.0.workers.wait().await;
    }
}

fn weight(completion: &Completion) -> usize {
    let run = completion.run.as_ref().map_or(0, |run| run.held_bytes());
    completion.recorded.held_bytes() + run
}

fn answer_weight(end: &Finish) -> usize {
    match &end.end {
        End::Delivered {
            answer: Some(answer),
            ..
        } => answer.held_bytes(),
        _ => 0,
    }
}

fn tick_weight(commit: &TickCommit) -> usize {
    let bodies = commit.tick.intents.iter().map(|intent| intent.body.len());
    commit.tick.progress.len() + bodies.sum::<usize>()
}

type Call<I, O> = for<'a> fn(&'a dyn Store, &'a [I]) -> BoxFuture<'a, Result<Vec<O>, StoreError>>;

/// One operation's queue, as callers see it.
pub struct Queue<I, O> {
    operation: &'static str,
    asks: mpsc::Sender<Ask<I, O>>,
    patience: Duration,
}

/// What one caller wants.
struct Ask<I, O> {
    item: I,
    progress: Arc<Progress>,
    reply: oneshot::Sender<Result<O, Arc<StoreError>>>,
}

impl<I, O> Queue<I, O> {
    /// Asks for one operation and waits for its outcome.
    ///
    /// # Errors
    /// The store's own, shared by all of a batch. [`StoreError::Unavailable`] when the queue is
    /// full or the item waited in it for too long; then it is not sent later either.
    /// [`StoreError::Ambiguous`] when the store took too long. [`StoreError::Closed`] after
    /// [`Group::close`].
    pub async fn ask(&self, item: I) -> Result<O, Arc<StoreError>> {
        let result = self.try_ask(item).await;
        result.map_err(|error| match error {
            // The worker has counted it.
            Failure::Stores(error) => error,
            Failure::Ours(error) => {
                count(self.operation, &error);
                Arc::new(error)
            }
        })
    }

    async fn try_ask(&self, item: I) -> Result<O, Failure> {
        let progress = Arc::new(Progress::default());
        let (reply, mut answer) = oneshot::channel();
        let ask = Ask {
            item,
            progress: Arc::clone(&progress),
            reply,
        };
        self.asks.try_send(ask).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Failure::Ours(unavailable("the queue is full")),
            mpsc::error::TrySendError::Closed(_) => Failure::Ours(StoreError::Closed),
        })?;
        match timeout(self.patience, &mut answer).await {
            Ok(Ok(result)) => result.map_err(Failure::Stores),
            _ if progress.withdraw() => Err(Failure::Ours(unavailable("the queue did not move"))),
            // It may have come between the two lines above.
            _ => match answer.try_recv() {
                Ok(result) => result.map_err(Failure::Stores),
                Err(_) => Err(Failure::Ours(ambiguous("the store took too long"))),
            },
        }
    }
}

/// Whose error it is.
enum Failure {
    /// The store's.
    Stores(Arc<StoreError>),
    /// The queue's.
    Ours(StoreError),
}

fn unavailable(why: &'static str) -> StoreError {
    StoreError::Unavailable(io::Error::new(io::ErrorKind::TimedOut, why).into())
}

fn ambiguous(why: &'static str) -> StoreError {
    StoreError::Ambiguous(io::Error::new(io::ErrorKind::TimedOut, why).into())
}

/// Decides between a worker that begins and a caller that gives up.
#[derive(Default)]
struct Progress(AtomicU8);

impl Progress {
    const WAITING: u8 = 0;
    const BEGUN: u8 = 1;
    const WITHDRAWN: u8 = 2;

    /// False: the caller has given up, and was told that it did not happen.
    fn begin(&self) -> bool {
        self.leave_for(Self::BEGUN)
    }

    /// False: the operation has begun.
    fn withdraw(&self) -> bool {
        self.leave_for(Self::WITHDRAWN)
    }

    fn leave_for(&self, next: u8) -> bool {
        let (acquire, relaxed) = (Ordering::AcqRel, Ordering::Acquire);
        let changed = self
            .0
            .compare_exchange(Self::WAITING, next, acquire, relaxed);
        changed.is_ok()
    }
}

/// Starts workers.
struct Crew {
    store: Arc<dyn Store>,
    options: GroupOptions,
    workers: TaskTracker,
    closing: CancellationToken,
}

impl Crew {
    fn staff<I, O>(
        &self,
        operation: &'static str,
        weight: fn(&I) -> usize,
        call: Call<I, O>,
    ) -> Queue<I, O>
    where
        I: Send + Sync + 'static,
        O: Send + 'static,
    {
        let (asks, queue) = mpsc::channel(QUEUE_MAX);
        let inbox = Arc::new(Mutex::new(Inbox {
            queue,
            next: None,
            weight,
            closing: self.closing.clone(),
        }));
        for _ in 0..self.options.concurrency.max(1) {
            let worker = Worker {
                operation,
                store: Arc::clone(&self.store),
                inbox: Arc::clone(&inbox),
                call,
            };
            self.workers.spawn(worker.run());
        }
        Queue {
            operation,
            asks,
            patience: self.options.patience,
        }
    }
}

/// One operation's queue, as its workers see it.
struct Inbox<I, O> {
    queue: mpsc::Receiver<Ask<I, O>>,
    /// What did not fit into the last batch.
    next: Option<Ask<I, O>>,
    weight: fn(&I) -> usize,
    closing: CancellationToken,
}

impl<I, O> Inbox<I, O> {
    /// Whatever has gathered, at least one. `None`: closed, and nothing is left.
    async fn batch(&mut self) -> Option<Vec<Ask<I, O>>> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut next = Some(self.first().await?);
        while let Some(ask) = next {
            bytes += (self.weight)(&ask.item);
            if !batch.is_empty() && bytes > BATCH_BYTES_MAX {
                self.next = Some(ask);
                break;
            }
            batch.push(ask);
            if batch.len() == BATCH_MAX {
                break;
            }
            next = self.queue.try_recv().ok();
        }
        Some(batch)
    }

    async fn first(&mut self) -> Option<Ask<I, O>> {
        if let Some(next) = self.next.take() {
            return Some(next);
        }
        if let Some(first) = self.closing.run_until_cancelled(self.queue.recv()).await {
            return first;
        }
        self.queue.close();
        self.queue.recv().await
    }
}

struct Worker<I, O> {
    operation: &'static str,
    store: Arc<dyn Store>,
    inbox: Arc<Mutex<Inbox<I, O>>>,
    call: Call<I, O>,
}

type Reply<O> = oneshot::Sender<Result<O, Arc<StoreError>>>;

impl<I, O> Worker<I, O> {
    async fn run(self) {
        loop {
            let batch = self.inbox.lock().await.batch().await;
            let Some(batch) = batch else { return };
            let begun = batch.into_iter().filter(|ask| ask.progress.begin());
            let (items, replies): (Vec<I>, Vec<Reply<O>>) =
                begun.map(|ask| (ask.item, ask.reply)).unzip();
            if !items.is_empty() {
                self.settle(&items, replies).await;
            }
        }
    }

    async fn settle(&self, items: &[I], replies: Vec<Reply<O>>) {
        match self.send(items).await {
            Ok(outcomes) => {
                for (reply, outcome) in replies.into_iter().zip(outcomes) {
                    // Whoever went away does not need to know.
                    let _ = reply.send(Ok(outcome));
                }
            }
            // One of them may be at fault; the others must not pay for it. Sending an operation
            // again changes nothing more.
            Err(error) if items.len() > 1 && may_concern_one(&error) => {
                for (item, reply) in items.iter().zip(replies) {
                    let outcome = self.send(slice::from_ref(item)).await;
                    let outcome = outcome.map(|mut outcomes| outcomes.pop());
                    match outcome.transpose() {
                        Some(outcome) => drop(reply.send(outcome.map_err(Arc::new))),
                        None => drop(reply),
                    }
                }
            }
            Err(error) => {
                let error = Arc::new(error);
                for reply in replies {
                    let _ = reply.send(Err(Arc::clone(&error)));
                }
            }
        }
    }

    async fn send(&self, items: &[I]) -> Result<Vec<O>, StoreError> {
        let begun = Instant::now();
        let result = (self.call)(&*self.store, items).await;
        metrics::histogram!(STORE_SECONDS, "operation" => self.operation).record(begun.elapsed());
        result.inspect_err(|error| count(self.operation, error))
    }
}

fn may_concern_one(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Inconsistent { .. } | StoreError::Refused(_)
    )
}

fn count(operation: &'static str, error: &StoreError) {
    let kind = error.kind();
    metrics::counter!(STORE_ERRORS, "operation" => operation, "kind" => kind).increment(1);
}
