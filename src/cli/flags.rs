//! The flags that stand for settings, and the variables that stand for flags.

use std::ffi::OsString;

use crate::config::input::{Environment, Given, Overrides};

/// Every flag that stands for a setting.
#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    store: StoreFlags,

    #[arg(
        long,
        value_name = "IP:PORT",
        help = "Where clients connect; port 0 picks one, and the log names it [default: 127.0.0.1:8080] [env: ONCEGATE_LISTEN]"
    )]
    listen: Option<OsString>,

    #[arg(
        long,
        value_name = "IP:PORT",
        help = "Where operators and scrapers connect [default: 127.0.0.1:9090] [env: ONCEGATE_ADMIN]"
    )]
    admin: Option<OsString>,

    #[arg(
        long,
        value_name = "URL",
        help = "The target of the pool \"default\"; when the file has no route, every path is guarded and sent there [env: ONCEGATE_UPSTREAM]"
    )]
    upstream: Option<OsString>,

    #[arg(
        long,
        value_name = "SOURCE",
        help = "Who a request is from: fixed:NAME, header:NAME or credential [env: ONCEGATE_TENANT]"
    )]
    tenant: Option<OsString>,

    #[arg(
        long,
        value_name = "FILTER",
        help = "What is logged, such as \"info\" or \"info,oncegate=debug\" [default: info] [env: ONCEGATE_LOG]"
    )]
    log: Option<OsString>,

    #[arg(
        long,
        value_name = "FORMAT",
        help = "How it is logged: text or json [default: text] [env: ONCEGATE_LOG_FORMAT]"
    )]
    log_format: Option<OsString>,

    #[arg(
        long,
        help = "Leave the store's tables as they are, and don't start when they are out of date"
    )]
    no_migrate: bool,
}

/// The flags about the store.
#[derive(Debug, clap::Args)]
pub(super) struct StoreFlags {
    #[arg(
        long,
        value_name = "FILE",
        help = "The configuration file (TOML) [env: ONCEGATE_CONFIG]"
    )]
    config: Option<OsString>,

    #[arg(
        long,
        value_name = "URL",
        help = "The store: sqlite:PATH or postgres://USER@HOST/DATABASE [default: sqlite:oncegate.db] [env: ONCEGATE_STORE]"
    )]
    store: Option<OsString>,
}

impl Flags {
    /// What these say and, for what they leave open, the environment.
    pub(super) fn overrides(&self, environment: &Environment) -> Overrides {
        let pick = |flag: &Option<OsString>, name, variable| {
            Given::pick(flag.clone(), name, variable, environment)
        };
        Overrides {
            listen: pick(&self.listen, "--listen", "ONCEGATE_LISTEN"),
            admin: pick(&self.admin, "--admin", "ONCEGATE_ADMIN"),
            upstream: pick(&self.upstream, "--upstream", "ONCEGATE_UPSTREAM"),
            tenant: pick(&self.tenant, "--tenant", "ONCEGATE_TENANT"),
            log: pick(&self.log, "--log", "ONCEGATE_LOG"),
            log_format: pick(&self.log_format, "--log-format", "ONCEGATE_LOG_FORMAT"),
            no_migrate: self.no_migrate,
            ..self.store.overrides(environment)
        }
    }
}

impl StoreFlags {
    /// What these say and, for what they leave open, the environment.
    pub(super) fn overrides(&self, environment: &Environment) -> Overrides {
        let config = self.config.clone();
        let store = self.store.clone();
        Overrides {
            config: Given::pick(config, "--config", "ONCEGATE_CONFIG", environment),
            store: Given::pick(store, "--store", "ONCEGATE_STORE", environment),
            ..Overrides::default()
        }
    }
}
