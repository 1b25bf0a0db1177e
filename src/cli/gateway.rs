//! What the commands share that ask a running gateway: where it is, who asks, what can go wrong,
//! and the question before something that can't be taken back.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::client::Client;
use super::paint::Paint;

/// Which gateway, and how to be told.
#[derive(Debug, clap::Args)]
pub(super) struct Gateway {
    /// Where the gateway's admin listener is.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "ONCEGATE_ADMIN",
        default_value = "http://127.0.0.1:9090"
    )]
    admin: String,
    /// A file that holds the token; without it `ONCEGATE_TOKEN` does.
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print the API's JSON instead of a table.
    #[arg(long, global = true)]
    pub(super) json: bool,
}

impl Gateway {
    /// The gateway there, told of as a table.
    pub(super) fn at(admin: &str, token_file: Option<&Path>) -> Self {
        Self {
            admin: admin.to_owned(),
            token_file: token_file.map(Path::to_owned),
            json: false,
        }
    }

    /// A client with the token.
    pub(super) fn client(&self) -> Result<Client, Failure> {
        Client::new(&self.admin, Some(&token(self)?))
    }
}

/// Why the command did not do what it was told to.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The gateway can't be reached, or did not answer as it should.
    #[error("{0}")]
    NoAnswer(String),
    /// The gateway refused, and says why.
    #[error("{detail}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What to do.
        detail: String,
    },
    /// There is no token to show.
    #[error("no token: set ONCEGATE_TOKEN or use --token-file FILE")]
    NoToken,
    /// A file can't be read.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// What was asked for is not clear; nothing was done.
    #[error("{0}")]
    Usage(&'static str),
    /// It was done to some of what was meant; the output tells to which not.
    #[error("it was not done to {refused} of them")]
    NotAll {
        /// To how many it was not.
        refused: usize,
    },
    /// Who was asked did not say yes.
    #[error("nothing was done")]
    NotConfirmed,
    /// The output can't be written.
    #[error("the output can't be written: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// As the help text lists them.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Refused { status: 400, .. } => 2,
            Self::Refused { status: 404, .. } => 4,
            Self::NotAll { .. } | Self::Refused { status: 409, .. } => 5,
            Self::NoToken
            | Self::Refused {
                status: 401 | 403, ..
            } => 6,
            Self::NotConfirmed => 7,
            Self::NoAnswer(_) | Self::Refused { .. } | Self::File { .. } | Self::Output(_) => 1,
        }
    }
}

/// Runs a command with the process's own output; every failure is told and becomes an exit code.
///
/// # Errors
/// When there is no runtime to be had.
pub(super) fn run(
    command: impl AsyncFnOnce(&mut (dyn Write + Send), Paint) -> Result<(), Failure>,
) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout();
    let paint = Paint::for_terminal(&out);
    match super::block_on(async { Ok(command(&mut out, paint).await) })? {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // Who closed the pipe has seen enough.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            eprintln!("error: {failure}");
            Ok(ExitCode::from(failure.exit_code()))
        }
    }
}

/// Shows what it is about and asks, if there is somebody to ask.
///
/// # Errors
/// [`Failure::NotConfirmed`], and what `show` meets.
pub(super) async fn confirm(
    yes: bool,
    warning: &str,
    show: impl AsyncFnOnce(&mut (dyn Write + Send), Paint) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let input = io::stdin();
    if yes || !input.is_terminal() {
        return Ok(());
    }
    let mut out = io::stderr();
    let paint = Paint::for_terminal(&out);
    show(&mut out, paint).await?;
    write!(out, "\n{warning}\nType yes to go on: ")?;
    out.flush()?;
    let mut line = String::new();
    input.lock().read_line(&mut line)?;
    if line.trim() == "yes" {
        Ok(())
    } else {
        Err(Failure::NotConfirmed)
    }
}

#[expect(clippy::disallowed_methods, reason = "the command line's environment")]
fn token(gateway: &Gateway) -> Result<String, Failure> {
    let text = match &gateway.token_file {
        Some(path) => String::from_utf8_lossy(&read(path)?).into_owned(),
        None => std::env::var("ONCEGATE_TOKEN").unwrap_or_default(),
    };
    let token = text.trim();
    if token.is_empty() {
        return Err(Failure::NoToken);
    }
    Ok(token.to_owned())
}

/// A file's bytes.
pub(super) fn read(path: &PathBuf) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| Failure::File {
        path: path.clone(),
        error,
    })
}
