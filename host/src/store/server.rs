//! A PostgreSQL server that keeps the state: `store` of `[pipeline]`.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::plugin::permissions::SecretSource;
use crate::source::config::SourceConfig;
use crate::source::session::{self, Session};

/// What waits for a connection is a pipeline: a dead server has to be noticed soon.
const MOST_CONNECT: Duration = Duration::from_secs(10);

/// Where the state of a pipeline is kept, in a schema of its own, and how to get there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreServer {
    server: SourceConfig,
    /// Read at each connection: secrets rotate.
    password: Option<SecretSource>,
}

impl StoreServer {
    /// Reads a URL as that of the source is read; the schema is named after the pipeline.
    ///
    /// # Errors
    /// As [`SourceConfig::parse`].
    pub fn parse(url: &str, password: Option<SecretSource>, pipeline: &str) -> Result<StoreServer> {
        // There is no publication, and nobody asks for one.
        let mut server = SourceConfig::parse(url, pipeline, pipeline)?;
        server.connect_timeout = server.connect_timeout.min(MOST_CONNECT);
        if server.application_name == format!("tidegate/{pipeline}") {
            server.application_name = format!("tidegate/{pipeline} store");
        }
        Ok(StoreServer { server, password })
    }

    /// The schema: named as the slot is, for the same reasons.
    pub fn schema(&self) -> &str {
        &self.server.slot
    }

    /// Names schema and server in messages, without the password.
    pub fn place(&self) -> String {
        format!("schema {} at {}", self.schema(), self.server.endpoint())
    }

    pub(super) fn user(&self) -> &str {
        &self.server.user
    }

    /// The number of the advisory lock that the writer of this schema holds.
    pub(super) fn lock_key(&self) -> i64 {
        let digest = Sha256::digest(format!("tidegate store {}", self.schema()));
        let mut key = [0; 8];
        key.copy_from_slice(&digest[..8]);
        i64::from_be_bytes(key)
    }

    /// Connects, within the time that the URL allows and 10 s at most.
    ///
    /// # Errors
    /// `state.login`; what is transient as [`session::connect`] has it, for the caller to
    /// try again.
    pub(super) async fn connect(&self) -> Result<Session> {
        let mut server = self.server.clone();
        if let Some(password) = &self.password {
            let password = password.read().map_err(|why| {
                Error::usage("config.secret", format!("[pipeline]: `store_password`: {why}"))
                    .next("Put the password there, or name where it is: env:NAME or file:PATH.")
            })?;
            server = server.with_password(password);
        }
        session::connect(&server).await.map_err(|error| if error.is_transient() { error } else { explain(&error) })
    }
}

/// What an error of a connection means here: it says `source` for the other server.
fn explain(error: &Error) -> Error {
    let next = match error.code() {
        "source.password" => {
            "Put the user into `store` of [pipeline] and the password where `store_password` says, or mend the server's pg_hba.conf."
        }
        "source.database-missing" => "Create that database, or name another in `store` of [pipeline].",
        "source.tls-missing" => {
            "Set `ssl = on` at the server, or add sslmode=disable to `store` of [pipeline] if the network is trusted."
        }
        code if code.starts_with("source.tls") => {
            "Check the server's certificate, and sslmode and sslrootcert in `store` of [pipeline]."
        }
        _ => "Check `store` of [pipeline], and look into the server's log.",
    };
    Error::no("state.login", format!("the server of the state does not let us in: {}", error.message())).next(next)
}

/// The server cannot be reached, or went away.
pub(super) fn unreachable(place: &str, why: &str) -> Error {
    Error::transient("state.unreachable", format!("the state in {place} cannot be reached: {why}")).next(
        "Check that the server runs, and host and port in `store` of [pipeline]; nothing is lost meanwhile, and the stream waits.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipelines_have_schemas_and_locks_of_their_own() {
        let server = |pipeline: &str| StoreServer::parse("postgres://me@db/states", None, pipeline).unwrap();
        assert_eq!(server("shop").place(), "schema tidegate_shop at me@db:5432/states");
        assert_ne!(server("shop").lock_key(), server("shop_").lock_key());
        assert_eq!(server("shop").lock_key(), server("shop").lock_key());
    }
}
