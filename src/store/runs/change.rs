//! What a tick's order makes of an intent, in SQL: the same on either store.
//!
//! Everything is judged on the row `i` as it is when it is written, and on the change `c`, which
//! has a `word` for the order and the status `seen`.

use crate::domain::intent::Order;

/// It is given up: nobody works on it.
macro_rules! dropped {
    ($now:literal) => {
        concat!(
            "(c.word = 'withdraw' and (i.status in ('dead', 'quarantined') or (i.status = 'pending' \
             and (i.claim_token is null or (i.due_at <= ",
            $now,
            ") is true))))"
        )
    };
}

/// It is redriven.
macro_rules! revived {
    () => {
        "(c.word = 'redrive' and i.status in ('dead', 'quarantined') and i.has_body)"
    };
}

/// Its turn comes, for the first time.
macro_rules! armed {
    () => {
        "(c.word = 'arm' and i.status = 'pending' and i.first_due_at is null and not i.withdrawn)"
    };
}

/// The columns that an order sets. A redrive that comes too late, when the bytes are gone, tells
/// the run that the intent is as dead as it was.
macro_rules! change_intent {
    ($now:literal) => {
        concat!(
            "set status = case when ",
            dropped!($now),
            " then 'discarded' when ",
            revived!(),
            " then 'pending' else i.status end, changed = case when ",
            dropped!($now),
            " then true when ",
            revived!(),
            " then false when c.word = 'redrive' and i.status in ('dead', 'quarantined') then true \
             when i.status = c.seen then false else i.changed end, due_at = case when ",
            dropped!($now),
            " then null when ",
            revived!(),
            " or ",
            armed!(),
            " then ",
            $now,
            " else i.due_at end, first_due_at = case when ",
            revived!(),
            " or ",
            armed!(),
            " then ",
            $now,
            " else i.first_due_at end, claim_token = case when ",
            dropped!($now),
            " then null else i.claim_token end, withdrawn = case when ",
            revived!(),
            " then false when c.word = 'withdraw' and i.status = 'pending' and not ",
            dropped!($now),
            " then true else i.withdrawn end, faults = case when ",
            revived!(),
            " then 0 else i.faults end, deaths = case when ",
            revived!(),
            " then 0 else i.deaths end, tries_before = case when ",
            revived!(),
            " then i.tries else i.tries_before end, redrives = case when ",
            revived!(),
            " then i.redrives + 1 else i.redrives end, ended_at = case when ",
            dropped!($now),
            " then ",
            $now,
            " when ",
            revived!(),
            " then null else i.ended_at end"
        )
    };
}

pub(in crate::store) use {armed, change_intent, dropped, revived};

/// The word of an order.
pub(in crate::store) fn word(order: Order) -> &'static str {
    match order {
        Order::None => "none",
        Order::Arm => "arm",
        Order::Withdraw => "withdraw",
        Order::Redrive => "redrive",
    }
}
