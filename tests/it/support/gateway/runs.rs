//! What tests of runs and effects set up.

use super::{Setup, TestGateway};
use crate::support::client::Call;
use crate::support::upstream::Upstream;

impl Setup {
    /// The destination `hook` at this upstream, quick to try again.
    #[must_use]
    pub fn hook(self, at: &Upstream) -> Self {
        let lines = format!(
            "id = \"hook\"\nurl = \"{}\"\nallow_private = true\ntimeout = \"5s\"\n\
             retry = {{ first = \"100ms\", max = \"500ms\", horizon = \"1h\", faults = 2 }}",
            at.url()
        );
        self.more("destination", &lines)
    }

    /// Tokens of the admin API: `operator-token`, `service-token`, `worker-token`.
    #[must_use]
    pub fn tokens(self) -> Self {
        ["operator", "service", "worker"]
            .into_iter()
            .fold(self, |setup, role| {
                let lines = format!(
                    "name = \"{role}\"\nrole = \"{role}\"\nsecret = \"${{env:TEST_{}}}\"",
                    role.to_uppercase()
                );
                let variable = (
                    format!("TEST_{}", role.to_uppercase()),
                    format!("{role}-token-of-a-test"),
                );
                setup.more("token", &lines).environment(vec![variable])
            })
    }
}

impl TestGateway {
    /// A request to the API under the token of this role.
    pub fn api(&self, role: &str, method: &str, target: &str) -> Call {
        let token = format!("Bearer {role}-token-of-a-test");
        self.admin_call(method, target)
            .header("authorization", token)
    }
}
