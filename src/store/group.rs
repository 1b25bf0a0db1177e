//! Group commit: while one batch commits, the next one gathers.
#![allow(missing_docs, clippy::all, clippy::pedantic)]
use super::*;
#[derive(Clone)]
pub struct Group(Arc<dyn Store>);
type R<T> = Result<T, Arc<StoreError>>;
impl Group {
    pub fn new(s: Arc<dyn Store>) -> Self {
        Self(s)
    }
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0
    }
    pub async fn reserve(&self, c: Claim) -> R<Reserved> {
        Ok(self.0.reserve(&[c]).await.map_err(Arc::new)?.pop().unwrap())
    }
    pub async fn heartbeat(&self, c: Heartbeat) -> R<bool> {
        Ok(self
            .0
            .heartbeat(&[c])
            .await
            .map_err(Arc::new)?
            .pop()
            .unwrap())
    }
    pub async fn complete(&self, c: Completion) -> R<Option<Committed>> {
        Ok(self
            .0
            .complete(&[c])
            .await
            .map_err(Arc::new)?
            .pop()
            .unwrap())
    }
    pub async fn release(&self, c: Release) -> R<Option<Released>> {
        Ok(self.0.release(&[c]).await.map_err(Arc::new)?.pop().unwrap())
    }
    pub async fn look_up(&self, c: RecordKey) -> R<Option<Record>> {
        Ok(self.0.look_up(&[c]).await.map_err(Arc::new)?.pop().unwrap())
    }
}
