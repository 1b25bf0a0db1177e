//! Stand-in until the real one is merged.

/// A database of one test.
pub struct TestDatabase {
    url: String,
}

impl TestDatabase {
    /// A fresh one.
    pub async fn fresh() -> Self {
        panic!("the server of the test run is not there yet")
    }

    /// Its URL.
    pub fn url(&self) -> String {
        self.url.clone()
    }
}
