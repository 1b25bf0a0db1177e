//! Contradictions in what follows from decisions: accepted requests, effects, runs and their times.

use std::time::Duration;

use super::super::Role;
use super::super::TokenConfig;
use super::super::destinations::{Destinations, Retries};
use super::super::report::Report;
use super::super::routing::RouteRead;
use super::super::value::Read;
use super::super::workflows::{self, Workflows};
use super::{Compared, refuse};
use crate::domain::policy::{Mode, OnStoreDown, OnUnknown};
use crate::domain::workflow::CALL;

/// Finds every contradiction that has to do with effects.
pub(in super::super) fn find(
    compared: &Compared,
    routes: &[RouteRead],
    destinations: &Destinations,
    workflows: &Workflows,
    report: &mut Report,
) {
    find_in_outbox(compared, report);
    let of_destinations = destinations.known.iter().map(|read| &read.timing);
    let of_workflows = workflows.known.iter().flat_map(|read| &read.timings);
    let of_routes = routes.iter().flat_map(|route| &route.follow_up.timings);
    for timing in of_destinations.chain(of_workflows).chain(of_routes) {
        find_in_retries(&timing.timeout, &timing.retry, report);
        find_in_keep(&timing.retry.horizon, compared, report);
    }
    for route in routes {
        if route.mode.value == Mode::Accept {
            find_in_accept(route, compared, report);
        }
        find_in_follow_up(route, report);
    }
}

fn find_in_outbox(compared: &Compared, report: &mut Report) {
    let (lease, operation) = (
        &compared.outbox.claim_lease,
        &compared.store.operation_timeout,
    );
    let advice = "one operation that hangs would cost a worker its claim, and the intent would be sent a second time; lengthen the lease or shorten the time-out";
    let over = lease.value <= operation.value;
    refuse(over, lease, "is not longer than", operation, advice, report);
    let of_tenant = &compared.outbox.in_flight_per_tenant_max;
    let all = &compared.outbox.in_flight_max;
    let advice =
        "one tenant can't have more than all together; raise the second or lower the first";
    let over = of_tenant.value > all.value;
    refuse(over, of_tenant, "is more than", all, advice, report);
}

fn find_in_retries(timeout: &Read<Duration>, retry: &Retries, report: &mut Report) {
    let Retries {
        first,
        max,
        horizon,
        ..
    } = retry;
    let advice = "pauses grow from the first to the longest; raise the second or lower the first";
    let over = first.value > max.value;
    refuse(over, first, "is longer than", max, advice, report);
    let advice =
        "the time would be over before the first try is; lengthen the second or shorten the first";
    let over = timeout.value > horizon.value;
    refuse(over, timeout, "is longer than", horizon, advice, report);
}

/// What is given up must still be there when someone looks.
fn find_in_keep(horizon: &Read<Duration>, compared: &Compared, report: &mut Report) {
    let advice = "what was tried for so long would be forgotten sooner than that; lengthen the first or shorten the second";
    for keep in [&compared.keep.runs, &compared.keep.dead] {
        let over = keep.value < horizon.value;
        refuse(over, keep, "is shorter than", horizon, advice, report);
    }
}

fn find_in_accept(route: &RouteRead, compared: &Compared, report: &mut Report) {
    let mode = &route.mode;
    let on_unknown = &route.on_unknown;
    let advice = "an accepted request is sent until it is answered, so nothing is ever held for a person to decide; write on_unknown = \"redrive\" or leave it out";
    let holds = on_unknown.value == OnUnknown::Hold;
    refuse(holds, on_unknown, "can't go with", mode, advice, report);
    let down = &route.on_store_down;
    let advice = "what is accepted must be in the store first; write on_store_down = \"refuse\" or leave it out";
    let passes = down.value == OnStoreDown::Pass;
    refuse(passes, down, "can't go with", mode, advice, report);
    let (runs, valid_for) = (&compared.keep.runs, &route.valid_for);
    let advice =
        "a duplicate would be sent to a run that is gone; lengthen the first or shorten the second";
    let over = runs.value < valid_for.value;
    refuse(over, runs, "is shorter than", valid_for, advice, report);
    let follow_up = route.follow_up.workflow.as_deref();
    let steps = follow_up.map_or(&[][..], |workflow| &workflow.steps);
    if steps.iter().any(|step| step.name == CALL) {
        report.error(
            &route.origin,
            format!("{mode}: its call is the step \"{CALL}\", and what follows up has a step of this name too; give that another"),
        );
    }
    if let Some(retry) = &route.retry {
        find_in_retries(&route.timeout, retry, report);
        find_in_keep(&retry.horizon, compared, report);
    }
}

fn find_in_follow_up(route: &RouteRead, report: &mut Report) {
    if !route.follow_up.is_written {
        return;
    }
    let name = route.mode.name.trim_end_matches(".mode");
    let methods = &route.methods;
    if methods.sound && methods.value.is_empty() {
        report.error(
            &methods.origin,
            format!("{methods}: nothing is decided on a route that guards no method, so its effects would never happen; name the methods"),
        );
    }
    if route.mode.value == Mode::Proxy && !route.required.value && route.required.sound {
        report.warn(
            &route.origin,
            format!("{name} has effects and takes requests without a key, which are passed on and have none; write required = true"),
        );
    }
    if route.mode.value == Mode::Proxy && route.on_store_down.value == OnStoreDown::Pass {
        let (down, origin) = (&route.on_store_down, &route.on_store_down.origin);
        report.warn(
            origin,
            format!("{down}: a request that is passed on while the store is away has no effects"),
        );
    }
}

/// Warns of what nothing refers to, unless callers of the API may.
pub(in super::super) fn find_unused(
    routes: &[RouteRead],
    destinations: &Destinations,
    workflows: &Workflows,
    tokens: &[TokenConfig],
    report: &mut Report,
) {
    if tokens.iter().any(|token| token.role == Role::Service) {
        return;
    }
    let followed: Vec<_> = routes
        .iter()
        .filter_map(|route| route.follow_up.workflow.as_deref())
        .collect();
    let broken =
        |route: &RouteRead| route.follow_up.is_written && route.follow_up.workflow.is_none();
    if routes.iter().any(broken) {
        return;
    }
    let advice = "and without a [[token]] of role \"service\" nobody else can";
    for read in &workflows.known {
        if read.workflow.is_some() && !followed.iter().any(|workflow| workflow.name == read.name) {
            let name = &read.name;
            report.warn(
                &read.origin,
                format!("no route follows up with the workflow \"{name}\", {advice}"),
            );
        }
    }
    let sends = || {
        let known = workflows.sound().map(AsRef::as_ref);
        followed
            .iter()
            .copied()
            .chain(known)
            .flat_map(workflows::sends)
    };
    for read in &destinations.known {
        let id = &read.config.id.0;
        if workflows.all_sound() && !sends().any(|send| workflows::destination_of(send) == Some(id))
        {
            report.warn(
                &read.origin,
                format!("no effect goes to the destination \"{id}\", {advice}"),
            );
        }
    }
}
