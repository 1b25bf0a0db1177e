//! Doubles of a store that are about records hand everything about runs and intents to the real
//! one.

macro_rules! delegate_runs_and_outbox {
    ($double:ty, $inner:ident) => {
        const _: () = {
            use oncegate::config::Keep;
            use oncegate::domain::intent::{
                ClaimWish, Destination, Finish, Finished, IntentClaimed, IntentId, IntentKey, Stamp,
            };
            use oncegate::domain::message::Recorded;
            use oncegate::domain::run::{
                LoadedRun, RunId, RunKey, RunStatus, TickCommit, TickCommitted,
            };
            use oncegate::store::outbox::{
                ClaimBeat, IntentLine, IntentSearch, Lane, LaneWish, OutboxCensus, Pause,
            };
            use oncegate::store::runs::{
                Attempt, DuePlace, RunLine, RunSearch, RunsDue, RunsPurged, Transition,
            };
            use oncegate::store::{Audit, Resolved, StoreError};

            #[async_trait::async_trait]
            impl oncegate::store::runs::RunStore for $double {
                async fn runs_due(
                    &self,
                    from: &DuePlace,
                    limit: u32,
                ) -> Result<RunsDue, StoreError> {
                    self.$inner.runs_due(from, limit).await
                }
                async fn load_runs(
                    &self,
                    keys: &[RunKey],
                ) -> Result<Vec<Option<LoadedRun>>, StoreError> {
                    self.$inner.load_runs(keys).await
                }
                async fn is_applied(&self, key: &RunKey, stamp: Stamp) -> Result<bool, StoreError> {
                    self.$inner.is_applied(key, stamp).await
                }
                async fn commit_ticks(
                    &self,
                    ticks: &[TickCommit],
                ) -> Result<Vec<TickCommitted>, StoreError> {
                    self.$inner.commit_ticks(ticks).await
                }
                async fn find_run(&self, id: RunId) -> Result<Option<RunKey>, StoreError> {
                    self.$inner.find_run(id).await
                }
                async fn show_run(&self, key: &RunKey) -> Result<Option<RunLine>, StoreError> {
                    self.$inner.show_run(key).await
                }
                async fn run_answer(
                    &self,
                    key: &RunKey,
                ) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError> {
                    self.$inner.run_answer(key).await
                }
                async fn find_runs(&self, search: &RunSearch) -> Result<Vec<RunLine>, StoreError> {
                    self.$inner.find_runs(search).await
                }
                async fn transitions(
                    &self,
                    key: &RunKey,
                    after: i64,
                    limit: u32,
                ) -> Result<Vec<Transition>, StoreError> {
                    self.$inner.transitions(key, after, limit).await
                }
                async fn attempts(
                    &self,
                    key: &RunKey,
                    limit: u32,
                ) -> Result<Vec<Attempt>, StoreError> {
                    self.$inner.attempts(key, limit).await
                }
                async fn purge_runs(
                    &self,
                    keep: Keep,
                    limit: u32,
                ) -> Result<RunsPurged, StoreError> {
                    self.$inner.purge_runs(keep, limit).await
                }
            }
            #[async_trait::async_trait]
            impl oncegate::store::outbox::OutboxStore for $double {
                async fn lanes(
                    &self,
                    after: Option<&Lane>,
                    limit: u32,
                ) -> Result<Vec<Lane>, StoreError> {
                    self.$inner.lanes(after, limit).await
                }
                async fn due(&self, wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError> {
                    self.$inner.due(wishes).await
                }
                async fn claim(
                    &self,
                    wishes: &[ClaimWish],
                ) -> Result<Vec<IntentClaimed>, StoreError> {
                    self.$inner.claim(wishes).await
                }
                async fn extend(&self, beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError> {
                    self.$inner.extend(beats).await
                }
                async fn finish(&self, ends: &[Finish]) -> Result<Vec<Finished>, StoreError> {
                    self.$inner.finish(ends).await
                }
                async fn find_intent(
                    &self,
                    id: IntentId,
                ) -> Result<Option<IntentLine>, StoreError> {
                    self.$inner.find_intent(id).await
                }
                async fn find_intents(
                    &self,
                    search: &IntentSearch,
                ) -> Result<Vec<IntentLine>, StoreError> {
                    self.$inner.find_intents(search).await
                }
                async fn discard(
                    &self,
                    key: &IntentKey,
                    audit: &Audit,
                ) -> Result<Resolved, StoreError> {
                    self.$inner.discard(key, audit).await
                }
                async fn set_paused(
                    &self,
                    destination: &Destination,
                    paused: bool,
                    audit: &Audit,
                ) -> Result<(), StoreError> {
                    self.$inner.set_paused(destination, paused, audit).await
                }
                async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
                    self.$inner.paused().await
                }
                async fn outbox_census(&self) -> Result<OutboxCensus, StoreError> {
                    self.$inner.outbox_census().await
                }
            }
        };
    };
}
pub(crate) use delegate_runs_and_outbox;
