//! What the operator writes under `[destination.settings]`.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Longest identifier PostgreSQL keeps, in bytes (`NAMEDATALEN - 1`).
pub const MAX_IDENTIFIER: usize = 63;

/// Whether the connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SslMode {
    /// Never.
    Disable,
    /// Always. The certificate is checked as far as the network grant says.
    Require,
    /// Always, with certificate and host name checked: what the host does unless the
    /// grant says otherwise.
    VerifyFull,
}

/// Whether the session acts as a replica: no triggers, no foreign keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReplicaRole {
    /// If the role may set `session_replication_role`, else not.
    Try,
    /// Refuse to start if it may not.
    Require,
    /// Leave it alone: triggers and foreign keys of the destination work.
    Off,
}

/// Settings of this plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Host name or address of the server; grant `host:port` under `network`.
    #[schemars(length(min = 1))]
    pub host: String,
    /// Port of the server.
    #[serde(default = "default_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
    /// Database that takes the tables; it must exist.
    #[schemars(length(min = 1))]
    pub database: String,
    /// Role to log in as. Its password is the secret `password`.
    #[schemars(length(min = 1))]
    pub user: String,
    /// Encryption of the connection.
    #[serde(default = "default_sslmode")]
    pub sslmode: SslMode,
    /// Put every table into this schema, whatever schema its target names.
    #[serde(default)]
    #[schemars(length(min = 1))]
    pub schema: Option<String>,
    /// Schema of this plugin's own tables (positions, lanes, copied batches).
    #[serde(default = "default_metadata_schema")]
    #[schemars(length(min = 1))]
    pub metadata_schema: String,
    /// What begins the names of those tables.
    #[serde(default)]
    pub metadata_prefix: String,
    /// Whether triggers and foreign keys of the destination stay silent.
    #[serde(default = "default_replica_role")]
    pub replica_role: ReplicaRole,
    /// How long dialling and the TLS handshake may take.
    #[serde(default = "default_connect_timeout")]
    #[schemars(range(min = 1))]
    pub connect_timeout_ms: u32,
    /// How long one statement may wait for a lock.
    #[serde(default = "default_lock_timeout")]
    #[schemars(range(min = 1))]
    pub lock_timeout_ms: u32,
    /// How long one answer of the server may take.
    #[serde(default = "default_response_timeout")]
    #[schemars(range(min = 1))]
    pub response_timeout_ms: u32,
    /// As it shows in `pg_stat_activity`; default `tidegate/<pipeline>/<destination>`.
    #[serde(default)]
    pub application_name: Option<String>,
}

fn default_port() -> u16 {
    5432
}

fn default_sslmode() -> SslMode {
    SslMode::VerifyFull
}

fn default_metadata_schema() -> String {
    "tidegate".to_owned()
}

fn default_replica_role() -> ReplicaRole {
    ReplicaRole::Try
}

fn default_connect_timeout() -> u32 {
    10_000
}

fn default_lock_timeout() -> u32 {
    30_000
}

/// Ten minutes: an index build under `set-not-null` or a rewrite on a large table.
fn default_response_timeout() -> u32 {
    600_000
}

impl Settings {
    /// What types and JSON Schema do not say. The message names the key.
    pub fn check(&self) -> Result<(), String> {
        for (key, value) in [
            ("host", Some(&self.host)),
            ("database", Some(&self.database)),
            ("user", Some(&self.user)),
            ("schema", self.schema.as_ref()),
            ("metadata_schema", Some(&self.metadata_schema)),
        ] {
            if value.is_some_and(|value| value.is_empty() || value.contains('\0')) {
                return Err(format!("`{key}` is empty or holds a NUL"));
            }
        }
        // The longest of our own names is `position`, `copied` or `lane` behind the prefix.
        if self.metadata_prefix.len() + "position".len() > MAX_IDENTIFIER || self.metadata_prefix.contains('\0') {
            return Err("`metadata_prefix` is longer than 55 bytes or holds a NUL".to_owned());
        }
        if self.metadata_schema.len() > MAX_IDENTIFIER {
            return Err(format!("`metadata_schema` is longer than {MAX_IDENTIFIER} bytes"));
        }
        Ok(())
    }

    /// Limit on dialling and the TLS handshake.
    pub fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_keys_are_enough_and_the_rest_has_safe_defaults() {
        let settings: Settings = serde_json::from_str(r#"{"host":"db","database":"shop","user":"mirror"}"#).unwrap();
        assert_eq!((settings.port, settings.sslmode), (5432, SslMode::VerifyFull));
        assert_eq!(settings.metadata_schema, "tidegate");
        settings.check().unwrap();
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = serde_json::from_str::<Settings>(r#"{"host":"db","database":"shop","user":"m","passwort":"x"}"#)
            .unwrap_err();
        assert!(error.to_string().contains("passwort"), "{error}");
    }

    #[test]
    fn an_empty_host_is_refused_by_name() {
        let settings: Settings = serde_json::from_str(r#"{"host":"","database":"shop","user":"mirror"}"#).unwrap();
        assert!(settings.check().unwrap_err().contains("host"));
    }
}
