//! Claims whose reply may be lost.

use std::time::Duration;

use crate::domain::intent::{ClaimWish, End, Finish, IntentClaimed, IntentKey, Note, Stamp};
use crate::ids;
use crate::store::StoreError;
use crate::store::outbox::OutboxStore;

/// How often a claim is asked for again whose reply was lost.
const AGAIN_MAX: u32 = 2;
/// The pause before, before jitter.
const PAUSE: Duration = Duration::from_millis(100);

/// Why there are no claims.
pub struct NoClaim {
    /// The store's newest word.
    pub error: StoreError,
    /// Whether claims may be there all the same.
    pub may_be_won: bool,
}

/// Asks for claims, and again with the same stamps if it may have happened: whatever was won by
/// the first time is told by the second.
///
/// # Errors
/// The store's own.
pub async fn claim(
    store: &dyn OutboxStore,
    wishes: &[ClaimWish],
) -> Result<Vec<IntentClaimed>, NoClaim> {
    let mut may_be_won = false;
    for _ in 0..AGAIN_MAX {
        match store.claim(wishes).await {
            Err(error) if error.may_have_happened() => may_be_won = true,
            Err(error) if !may_be_won => return Err(NoClaim { error, may_be_won }),
            Err(_) => {}
            Ok(claimed) => return Ok(claimed),
        }
        tokio::time::sleep(PAUSE.mul_f64(0.5 + ids::jitter())).await;
    }
    store.claim(wishes).await.map_err(|error| NoClaim {
        may_be_won: may_be_won || error.may_have_happened(),
        error,
    })
}

/// Gives a claim back.
pub fn given_back(key: IntentKey, stamp: Stamp, outcome: &str) -> Finish {
    Finish {
        key,
        stamp,
        end: End::GivenBack {
            after: Duration::ZERO,
        },
        note: Note {
            outcome: outcome.to_owned(),
            ..Note::default()
        },
    }
}
