//! Values that are each allowed and not together.
//!
//! What can't work is refused whoever wrote it. A time that someone wrote and that only a default
//! contradicts is a warning at most, so that one line can be tried without five others.

pub(super) mod effects;

use std::net::SocketAddr;
use std::time::Duration;

use super::outbox::{KeepCompared, OutboxCompared};
use super::report::{Origin, Report};
use super::routing::RouteRead;
use super::value::Read;
use crate::domain::policy::{ForwardKey, OnUnknown};

/// The values outside the routes that others must agree with.
pub(super) struct Compared {
    pub(super) listen: Read<SocketAddr>,
    pub(super) admin: Read<SocketAddr>,
    pub(super) store: StoreCompared,
    pub(super) limits: LimitsCompared,
    pub(super) outbox: OutboxCompared,
    pub(super) keep: KeepCompared,
}

/// Those of the store.
pub(super) struct StoreCompared {
    pub(super) poll_interval: Read<Duration>,
    pub(super) operation_timeout: Read<Duration>,
}

/// Those of the limits.
pub(super) struct LimitsCompared {
    pub(super) waiters_per_key_max: Read<usize>,
    pub(super) waiters_max: Read<usize>,
    pub(super) body_bytes_total_max: Read<usize>,
    pub(super) record_retry_bytes_max: Read<usize>,
    pub(super) record_retry: Read<Duration>,
    pub(super) cache_bytes_max: Read<u64>,
    pub(super) cache_trust: Read<Duration>,
}

/// Finds every contradiction, and routes that no request can reach.
pub(super) fn find(compared: &Compared, routes: &[RouteRead], report: &mut Report) {
    find_outside_routes(compared, report);
    for route in routes {
        find_in_lease(route, compared, report);
        find_in_validity(route, compared, report);
        find_in_sizes(route, compared, report);
        find_in_redrive(route, report);
    }
    find_hidden(routes, report);
}

fn find_outside_routes(compared: &Compared, report: &mut Report) {
    let Compared { listen, admin, .. } = compared;
    let same = listen.value == admin.value && listen.value.port() != 0;
    let advice = "the admin API needs one of its own";
    refuse(
        same,
        listen,
        "is the same address as",
        admin,
        advice,
        report,
    );
    let (per_key, all) = (
        &compared.limits.waiters_per_key_max,
        &compared.limits.waiters_max,
    );
    let advice = "one key can't have more waiters than all keys together; raise the second or lower the first";
    refuse(
        per_key.value > all.value,
        per_key,
        "is more than",
        all,
        advice,
        report,
    );
}

fn find_in_lease(route: &RouteRead, compared: &Compared, report: &mut Report) {
    let lease = &route.lease;
    let poll = &compared.store.poll_interval;
    let advice = "waiters would look less often than leases end; lengthen the lease or shorten the poll interval";
    refuse(
        lease.value <= poll.value,
        lease,
        "is not longer than",
        poll,
        advice,
        report,
    );
    let operation = &compared.store.operation_timeout;
    let slow = lease.value <= operation.value;
    if slow && lease.sound && operation.sound {
        let (origin, what) = told(lease, "is not longer than", operation);
        report.warn(&origin, format!("{what}: one heartbeat that hangs can cost an owner its lease; lengthen the lease or shorten the time-out"));
    }
}

fn find_in_validity(route: &RouteRead, compared: &Compared, report: &mut Report) {
    let valid_for = &route.valid_for;
    let (timeout, linger) = (&route.timeout, &route.linger);
    let sound = valid_for.sound && timeout.sound && linger.sound;
    if sound && valid_for.value < timeout.value.saturating_add(linger.value) {
        let (origin, what) = told(valid_for, "is shorter than", timeout);
        let what = format!(
            "{what} plus {linger}: a client that waits for its time-out and then retries would run a second time; lengthen valid_for or shorten the others"
        );
        let call_written = timeout.origin.is_written() || linger.origin.is_written();
        if valid_for.origin.is_written() && call_written {
            report.error(&origin, what);
        } else {
            report.warn(&origin, what);
        }
    }
    let trust = &compared.limits.cache_trust;
    let advice =
        "a purge would not be seen while a key is valid; shorten cache_trust or lengthen valid_for";
    let over = trust.origin.is_written() && trust.value >= valid_for.value;
    refuse(
        over,
        trust,
        "is not shorter than",
        valid_for,
        advice,
        report,
    );
    let retry = &compared.limits.record_retry;
    let advice = "the record could be purged while its answer is still to be committed; shorten record_retry or lengthen valid_for";
    let over = retry.origin.is_written() && retry.value > valid_for.value;
    refuse(over, retry, "is longer than", valid_for, advice, report);
}

fn find_in_sizes(route: &RouteRead, compared: &Compared, report: &mut Report) {
    let (body, total) = (&route.body_max, &compared.limits.body_bytes_total_max);
    let advice = "such a body could never be held; raise the second or lower the first";
    refuse(
        body.value > total.value,
        body,
        "is more than",
        total,
        advice,
        report,
    );
    let (stored, retried) = (
        &route.store_body_max,
        &compared.limits.record_retry_bytes_max,
    );
    let advice =
        "such an answer would be lost when the store is away; raise the second or lower the first";
    refuse(
        stored.value > retried.value,
        stored,
        "is more than",
        retried,
        advice,
        report,
    );
    let cache = &compared.limits.cache_bytes_max;
    let advice = "such an answer could never be cached; raise the second or lower the first";
    refuse(
        stored.value as u64 > cache.value,
        stored,
        "is more than",
        cache,
        advice,
        report,
    );
}

fn find_in_redrive(route: &RouteRead, report: &mut Report) {
    let (on_unknown, forward_key) = (&route.on_unknown, &route.forward_key);
    let blind = on_unknown.value == OnUnknown::Redrive && forward_key.value == ForwardKey::None;
    let advice =
        "the upstream could not tell the second send from a new request; forward the key, or hold";
    refuse(
        blind,
        on_unknown,
        "can't go with",
        forward_key,
        advice,
        report,
    );
}

fn find_hidden(routes: &[RouteRead], report: &mut Report) {
    for (index, later) in routes.iter().enumerate() {
        let hiding = routes[..index].iter().find(|earlier| earlier.hides(later));
        if let (Some(earlier), Some(path)) = (hiding, &later.path) {
            let origin = &earlier.origin;
            report.warn(
                &later.origin,
                format!("no request can reach this route ({path}): the first match wins, and the one at {origin} takes them all; put this one first"),
            );
        }
    }
}

/// Notes an error when two sound values contradict each other.
fn refuse<A, B>(
    contradiction: bool,
    first: &Read<A>,
    relation: &str,
    second: &Read<B>,
    advice: &str,
    report: &mut Report,
) {
    if contradiction && first.sound && second.sound {
        let (origin, what) = told(first, relation, second);
        report.error(&origin, format!("{what}: {advice}"));
    }
}

/// Both values, and where to look first: at the one that was written.
fn told<A, B>(first: &Read<A>, relation: &str, second: &Read<B>) -> (Origin, String) {
    let (first_at, second_at) = (&first.origin, &second.origin);
    if first_at.is_written() {
        (
            first_at.clone(),
            format!("{first} {relation} {second} ({second_at})"),
        )
    } else {
        (
            second_at.clone(),
            format!("{first} ({first_at}) {relation} {second}"),
        )
    }
}
