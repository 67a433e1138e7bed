//! What a destination's configuration grants its plugin, and whether that is what the
//! plugin asks for. Every decision about a name, a file or a secret is made here.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::address::Range;
use crate::error::{Error, Result};

/// All that a destination's plugin may reach. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grants {
    /// Names and ports it may dial.
    pub network: Vec<NetworkGrant>,
    /// Directories it finds.
    pub files: Vec<FileGrant>,
    /// Secrets by the name it asks for.
    pub secrets: BTreeMap<String, SecretGrant>,
}

/// One `host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkGrant {
    /// Lower case, without the final dot. `*.` at the start stands for one label.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The name may lead to private addresses and the machine itself.
    pub private: bool,
    /// PEM file of the authorities that are trusted instead of the system's.
    pub ca: Option<PathBuf>,
}

/// One directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileGrant {
    /// Where it is.
    pub path: PathBuf,
    /// What the plugin calls it: the path as the configuration spells it, so that a
    /// setting with the same text works.
    pub guest: String,
    /// Read only otherwise.
    pub write: bool,
}

/// Where a secret comes from and what may be done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretGrant {
    /// Where it is read, each time it is used: secrets rotate.
    pub source: SecretSource,
    /// The plugin may see the value; otherwise the host uses it on the plugin's behalf.
    pub readable: bool,
}

/// A reference to a secret, never the secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    /// `env:NAME`
    Environment(String),
    /// `file:PATH`; a newline at the end does not count.
    File(PathBuf),
}

/// `[destination.grant]`, as written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrantsConfig {
    /// `"host:port"`, or a table with `private` and `ca`.
    pub network: Vec<NetworkConfig>,
    /// `"path"` (read-write), or a table with `mode`.
    pub files: Vec<FileConfig>,
    /// `name = "env:NAME"`, or a table with `readable`.
    pub secrets: BTreeMap<String, SecretConfig>,
}

/// An entry of `network`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum NetworkConfig {
    /// `"host:port"`
    Address(String),
    /// `{ address = "host:port", private = true, ca = "ca.pem" }`
    Table(NetworkTable),
}

/// The long form of an entry of `network`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkTable {
    address: String,
    #[serde(default)]
    private: bool,
    ca: Option<PathBuf>,
}

/// An entry of `files`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum FileConfig {
    /// The directory, read-write.
    Path(String),
    /// `{ path = "out", mode = "read-only" }`
    Table(FileTable),
}

/// The long form of an entry of `files`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileTable {
    path: String,
    #[serde(default)]
    mode: FileMode,
}

/// What may be done in a granted directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileMode {
    /// Also `read`.
    #[serde(alias = "read")]
    ReadOnly,
    /// Also `write`.
    #[default]
    #[serde(alias = "write")]
    ReadWrite,
}

/// An entry of `secrets`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum SecretConfig {
    /// `"env:NAME"` or `"file:PATH"`
    Reference(String),
    /// `{ from = "env:NAME", readable = true }`
    Table(SecretTable),
}

/// The long form of an entry of `secrets`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretTable {
    from: String,
    #[serde(default)]
    readable: bool,
}

impl Grants {
    /// From the configuration; relative paths are relative to `base`.
    ///
    /// # Errors
    /// `config.grant`, which names the entry.
    pub fn new(config: GrantsConfig, base: &Path) -> Result<Grants> {
        let network = config.network.into_iter().map(|entry| match entry {
            NetworkConfig::Address(address) => NetworkGrant::parse(&address),
            NetworkConfig::Table(table) => Ok(NetworkGrant {
                private: table.private,
                ca: table.ca.map(|ca| base.join(ca)),
                ..NetworkGrant::parse(&table.address)?
            }),
        });
        let files = config.files.into_iter().map(|entry| {
            let (path, mode) = match entry {
                FileConfig::Path(path) => (path, FileMode::ReadWrite),
                FileConfig::Table(table) => (table.path, table.mode),
            };
            if path.is_empty() {
                return Err(bad_grant("files", "", "names no directory"));
            }
            Ok(FileGrant { path: base.join(&path), guest: path, write: mode == FileMode::ReadWrite })
        });
        let secrets = config.secrets.into_iter().map(|(name, entry)| {
            let (from, readable) = match entry {
                SecretConfig::Reference(from) => (from, false),
                SecretConfig::Table(table) => (table.from, table.readable),
            };
            let source = SecretSource::parse(&from, base).ok_or_else(|| bad_secret(&name))?;
            Ok((name, SecretGrant { source, readable }))
        });
        Ok(Grants {
            network: network.collect::<Result<_>>()?,
            files: files.collect::<Result<_>>()?,
            secrets: secrets.collect::<Result<_>>()?,
        })
    }

    /// The grant that covers `host:port`; the host in lower case without a final dot.
    /// An exact one goes before a wildcard, and one with more rights before another.
    pub fn network(&self, host: &str, port: u16) -> Option<&NetworkGrant> {
        self.network
            .iter()
            .filter(|grant| grant.covers(host, port))
            .max_by_key(|grant| (grant.host == host, grant.private, grant.ca.is_some()))
    }

    /// What `asked` (a manifest's permissions) names and this does not give, a sentence
    /// each. `settings` are the destination's: `network:url` means whatever the
    /// setting `url` points to.
    pub fn missing(&self, asked: &[String], settings: &Value) -> Vec<Missing> {
        asked.iter().filter_map(|permission| self.misses(permission, settings)).collect()
    }

    /// What each asked permission comes to, and what is granted that nothing asks for: a
    /// part of a sentence each, for a person.
    pub fn explain(&self, asked: &[String], settings: &Value) -> Vec<String> {
        let mut lines = Vec::new();
        let mut used: Vec<String> = Vec::new();
        for permission in asked {
            let given = self.given(permission, settings);
            let came_to = match self.misses(permission, settings) {
                Some(missing) => format!("not granted ({})", missing.reason),
                None if given.is_empty() => "nothing to grant".to_owned(),
                None => format!("granted as {}", given.join(", ")),
            };
            lines.push(format!("asks for {permission}: {came_to}"));
            used.extend(given);
        }
        if asked.is_empty() {
            lines.push("asks for nothing".to_owned());
        }
        let unused: Vec<String> = self.all().into_iter().filter(|grant| !used.contains(grant)).collect();
        if !unused.is_empty() {
            lines.push(format!("granted without being asked for: {}", unused.join(", ")));
        }
        lines
    }

    /// Every grant.
    fn all(&self) -> Vec<String> {
        let network = self.network.iter().map(NetworkGrant::shown);
        let files = self.files.iter().map(FileGrant::shown);
        let secrets = self.secrets.iter().map(|(name, grant)| grant.shown(name));
        network.chain(files).chain(secrets).collect()
    }

    /// The grants that a permission gets.
    fn given(&self, permission: &str, settings: &Value) -> Vec<String> {
        let Some((kind, name)) = permission.split_once(':') else { return Vec::new() };
        let texts = setting(settings, name).map(texts).unwrap_or_default();
        match kind {
            "network" => {
                let targets = texts.into_iter().filter_map(|text| target_of(text, settings));
                targets.filter_map(|(host, port)| self.network(&host, port)).map(NetworkGrant::shown).collect()
            }
            "files" => texts.into_iter().filter_map(|path| self.directory(path)).map(FileGrant::shown).collect(),
            _ => self.secrets.get(name).map(|grant| grant.shown(name)).into_iter().collect(),
        }
    }

    /// The directory that a path is in, as the guest spells it.
    fn directory(&self, path: &str) -> Option<&FileGrant> {
        let path = Path::new(path);
        // What goes up is refused where it is opened, whatever it comes to.
        if path.components().any(|part| part == std::path::Component::ParentDir) {
            let named = |grant: &&FileGrant| Path::new(&grant.guest) == path;
            return self.files.iter().find(named);
        }
        self.files.iter().find(|grant| path.starts_with(&grant.guest) || path.starts_with(&grant.path))
    }

    fn misses(&self, permission: &str, settings: &Value) -> Option<Missing> {
        let missing = |reason: String| Some(Missing { permission: permission.to_owned(), reason });
        let Some((kind, name)) = permission.split_once(':').filter(|(kind, _)| KINDS.contains(kind)) else {
            return missing(format!("this host knows permissions of the kinds {} only", KINDS.join(", ")));
        };
        let setting = setting(settings, name);
        match kind {
            // An optional setting that is absent asks for nothing.
            "network" => {
                for target in setting.into_iter().flat_map(texts) {
                    match target_of(target, settings) {
                        Some((host, port)) if self.network(&host, port).is_some() => {}
                        Some((host, port)) => {
                            return missing(format!(
                                "the setting `{name}` leads to {}, which is not in grant.network",
                                Address(&host, port)
                            ));
                        }
                        None if self.network.is_empty() => {
                            return missing(format!("grant.network is empty, and the setting `{name}` names a host"));
                        }
                        None => {}
                    }
                }
                None
            }
            "files" => {
                for path in setting.into_iter().flat_map(texts) {
                    if self.directory(path).is_none() {
                        return missing(format!(
                            "the setting `{name}` is {path:?}, which is in no directory of grant.files"
                        ));
                    }
                }
                None
            }
            "secret" => match self.secrets.get(name) {
                None => missing(format!("no secret `{name}` in grant.secrets")),
                Some(grant) if !grant.readable => missing(format!("the secret `{name}` is not granted as readable")),
                Some(_) => None,
            },
            "inject" | "sign" if !self.secrets.contains_key(name) => {
                missing(format!("no secret `{name}` in grant.secrets"))
            }
            _ => None,
        }
    }
}

/// What a permission begins with.
const KINDS: [&str; 5] = ["network", "files", "secret", "inject", "sign"];

/// A permission that is asked for and not granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// As in the manifest.
    pub permission: String,
    /// For a person.
    pub reason: String,
}

impl NetworkGrant {
    /// `host:port`, `[v6]:port` or `*.example.com:port`.
    ///
    /// # Errors
    /// `config.grant`.
    pub fn parse(text: &str) -> Result<NetworkGrant> {
        let bad = |why: &str| bad_grant("network", text, why);
        let (host, port) = text.rsplit_once(':').ok_or_else(|| bad("has no port"))?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(|| bad("has no port between 1 and 65535"))?;
        if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
            return Err(bad("needs brackets around an IPv6 address, and takes no scheme or path"));
        }
        let host = normal_host(host);
        let name = host.strip_prefix("*.").unwrap_or(&host);
        if host.parse::<IpAddr>().is_err() {
            let label = |label: &str| {
                !label.is_empty()
                    && label.len() <= 63
                    && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            };
            if host.starts_with("*.") && !name.contains('.') {
                return Err(bad("has a wildcard for a whole top-level domain"));
            }
            if !name.split('.').all(label) {
                return Err(bad("is not a host name; `*` may only stand for the first label"));
            }
        }
        Ok(NetworkGrant { host, port, private: false, ca: None })
    }

    fn shown(&self) -> String {
        let private = if self.private { " (private addresses too)" } else { "" };
        format!("network {self}{private}")
    }

    fn covers(&self, host: &str, port: u16) -> bool {
        self.port == port
            && match self.host.strip_prefix('*') {
                // What the star stands for is one label, never an address.
                Some(suffix) => {
                    host.parse::<IpAddr>().is_err()
                        && host.strip_suffix(suffix).is_some_and(|label| !label.is_empty() && !label.contains('.'))
                }
                None => match (self.host.parse::<IpAddr>(), host.parse::<IpAddr>()) {
                    (Ok(a), Ok(b)) => a == b,
                    _ => self.host == host,
                },
            }
    }

    /// Whether the grant covers this address too, now that the name led to it.
    pub(crate) fn permits(&self, address: IpAddr) -> bool {
        // Naming the address itself is the strongest grant there is.
        if self.host.parse::<IpAddr>().is_ok_and(|named| named == address) {
            return true;
        }
        match Range::of(address) {
            Range::Public => true,
            Range::Loopback => self.private || self.host == "localhost",
            Range::Private => self.private,
            Range::LinkLocal | Range::Metadata | Range::Special => false,
        }
    }
}

impl fmt::Display for NetworkGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Address(&self.host, self.port).fmt(f)
    }
}

/// `host:port`, with brackets where the host is an IPv6 address.
pub(crate) struct Address<'a>(pub &'a str, pub u16);

impl fmt::Display for Address<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains(':') { write!(f, "[{}]:{}", self.0, self.1) } else { write!(f, "{}:{}", self.0, self.1) }
    }
}

/// Lower case, no brackets, no final dot.
pub(crate) fn normal_host(host: &str) -> String {
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

impl FileGrant {
    fn shown(&self) -> String {
        format!("files {} ({})", self.guest, if self.write { "read-write" } else { "read-only" })
    }
}

impl SecretGrant {
    fn shown(&self, name: &str) -> String {
        format!("secret {name} ({})", if self.readable { "readable" } else { "stays in the host" })
    }
}

/// Bytes of a secret. A certificate's key has some thousand.
const SECRET_BYTES: u64 = 64 * 1024;

impl SecretSource {
    fn parse(text: &str, base: &Path) -> Option<SecretSource> {
        match text.split_once(':')? {
            (_, "") => None,
            ("env", name) => Some(SecretSource::Environment(name.to_owned())),
            ("file", path) => Some(SecretSource::File(base.join(path))),
            _ => None,
        }
    }

    /// The secret, as it is now. The error says where it was looked for.
    pub(crate) fn read(&self) -> Result<String, String> {
        match self {
            SecretSource::Environment(name) => {
                std::env::var(name).map_err(|_| format!("the environment variable {name} is not set (or not UTF-8)"))
            }
            SecretSource::File(path) => {
                let mut text = String::new();
                let read = std::fs::File::open(path)
                    .and_then(|file| file.take(SECRET_BYTES + 1).read_to_string(&mut text))
                    .map_err(|e| format!("{}: {}", path.display(), e.kind()))?;
                if read as u64 > SECRET_BYTES {
                    return Err(format!("{} has more than {} KiB", path.display(), SECRET_BYTES >> 10));
                }
                text.truncate(text.trim_end_matches(['\n', '\r']).len());
                Ok(text)
            }
        }
    }
}

/// A setting by its dotted path.
fn setting<'a>(settings: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(settings, |value, key| value.get(key))
}

/// The texts of a setting that is one or a list of them.
fn texts(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().into_iter().collect(),
    }
}

/// Host and port of a URL or of `host:port`; for a bare host the port is the setting
/// `port`, if there is one.
fn target_of(text: &str, settings: &Value) -> Option<(String, u16)> {
    if text.contains("://") {
        let url = url::Url::parse(text).ok()?;
        let port = url.port_or_known_default().or(match url.scheme() {
            "postgres" | "postgresql" => Some(5432),
            _ => None,
        })?;
        return Some((normal_host(url.host_str()?), port));
    }
    if let Ok(grant) = NetworkGrant::parse(text) {
        return Some((grant.host, grant.port));
    }
    let port = settings.get("port")?.as_u64()?;
    Some((normal_host(text), u16::try_from(port).ok()?))
}

fn bad_grant(list: &str, entry: &str, why: &str) -> Error {
    Error::usage("config.grant", format!("grant.{list}: {entry:?} {why}")).next(match list {
        "network" => "Write `host:port`, e.g. `db.example.com:5432`, `*.example.com:443` or `[::1]:5432`.",
        _ => "Write a directory, e.g. `out` or `{ path = \"out\", mode = \"read-only\" }`.",
    })
}

/// The text is not repeated: it may be the secret itself.
fn bad_secret(name: &str) -> Error {
    Error::usage("config.grant", format!("grant.secrets: `{name}` is not a reference to a secret"))
        .next("Write `env:NAME` or `file:PATH`; a secret itself is never written here.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn grants(network: &[&str]) -> Grants {
        Grants { network: network.iter().map(|text| NetworkGrant::parse(text).unwrap()).collect(), ..Grants::default() }
    }

    #[test]
    fn a_name_is_covered_exactly_or_by_a_wildcard_of_one_label() {
        let grants = grants(&["db.internal:5432", "*.example.com:443", "[::1]:5432", "DB2.Internal.:1"]);
        for (host, port, covered) in [
            ("db.internal", 5432, true),
            ("db.internal", 5433, false),
            ("xdb.internal", 5432, false),
            ("a.example.com", 443, true),
            ("a.b.example.com", 443, false),
            ("example.com", 443, false),
            (".example.com", 443, false),
            ("aexample.com", 443, false),
            ("::1", 5432, true),
            ("0:0:0:0:0:0:0:1", 5432, true),
            ("db2.internal", 1, true),
        ] {
            assert_eq!(grants.network(host, port).is_some(), covered, "{host}:{port}");
        }
    }

    #[test]
    fn a_grant_that_means_something_else_than_it_says_is_refused() {
        for text in [
            "db.internal",
            "db.internal:0",
            "db.internal:70000",
            "*:443",
            "*.com:443",
            "a.*.com:443",
            "::1:80",
            "http://x:80",
            "x/y:80",
            ":80",
            "a..b:80",
        ] {
            assert_eq!(NetworkGrant::parse(text).unwrap_err().code(), "config.grant", "{text}");
        }
    }

    #[test]
    fn only_a_grant_that_names_it_permits_an_address_inside() {
        let permits = |grant: &str, private: bool, address: &str| {
            NetworkGrant { private, ..NetworkGrant::parse(grant).unwrap() }.permits(address.parse().unwrap())
        };
        assert!(permits("db.example.com:1", false, "8.8.8.8"));
        assert!(!permits("db.example.com:1", false, "127.0.0.1"));
        assert!(!permits("db.example.com:1", false, "10.0.0.1"));
        assert!(!permits("db.example.com:1", false, "::ffff:10.0.0.1"));
        assert!(permits("db.example.com:1", true, "10.0.0.1"));
        assert!(permits("db.example.com:1", true, "127.0.0.1"));
        assert!(!permits("db.example.com:1", true, "169.254.169.254"));
        assert!(!permits("localhost:1", false, "10.0.0.1"));
        assert!(permits("localhost:1", false, "::1"));
        assert!(permits("169.254.169.254:80", false, "169.254.169.254"));
        assert!(!permits("127.0.0.1:80", false, "127.0.0.2"));
    }

    #[test]
    fn what_is_asked_and_not_granted_is_listed_with_the_reason() {
        let config: GrantsConfig = serde_json::from_value(json!({
            "network": ["db.internal:5432"],
            "files": ["out", {"path": "/srv/in", "mode": "read-only"}],
            "secrets": {"password": "env:P", "key": {"from": "file:k", "readable": true}}
        }))
        .unwrap();
        let grants = Grants::new(config, Path::new("/etc/tidegate")).unwrap();
        assert_eq!(grants.files[0], FileGrant { path: "/etc/tidegate/out".into(), guest: "out".into(), write: true });
        let settings = json!({"url": "postgres://other/db", "host": "db.internal", "port": 5432, "directory": "out/a", "elsewhere": "/tmp", "up": "out/../x"});
        let asked = [
            "network:url",
            "network:host",
            "network:absent",
            "files:directory",
            "files:elsewhere",
            "secret:password",
            "secret:key",
            "sign:token",
            "files:up",
            "sockets:all",
        ];
        let missing = grants.missing(&asked.map(String::from), &settings);
        let names: Vec<_> = missing.iter().map(|m| m.permission.as_str()).collect();
        assert_eq!(
            names,
            ["network:url", "files:elsewhere", "secret:password", "sign:token", "files:up", "sockets:all"]
        );
        assert!(missing[0].reason.contains("other:5432"), "{}", missing[0].reason);
    }

    #[test]
    fn what_a_plugin_would_get_is_told_and_what_nobody_asked_for() {
        let config: GrantsConfig = serde_json::from_value(json!({
            "network": ["db.internal:5432", {"address": "10.0.0.1:80", "private": true}],
            "files": [{"path": "out", "mode": "read-only"}],
            "secrets": {"password": {"from": "env:P", "readable": true}, "spare": "env:S"}
        }))
        .unwrap();
        let grants = Grants::new(config, Path::new("/etc/tidegate")).unwrap();
        let settings = json!({"host": "db.internal", "port": 5432, "path": "out/a", "elsewhere": "/tmp"});
        let asked = ["network:host", "network:optional", "files:path", "files:elsewhere", "secret:password"];
        assert_eq!(
            grants.explain(&asked.map(String::from), &settings),
            [
                "asks for network:host: granted as network db.internal:5432",
                "asks for network:optional: nothing to grant",
                "asks for files:path: granted as files out (read-only)",
                "asks for files:elsewhere: not granted (the setting `elsewhere` is \"/tmp\", which is in no directory of grant.files)",
                "asks for secret:password: granted as secret password (readable)",
                "granted without being asked for: network 10.0.0.1:80 (private addresses too), secret spare (stays in the host)",
            ]
        );
    }

    #[test]
    fn a_secret_written_in_the_configuration_is_refused_and_not_repeated() {
        let config: GrantsConfig = serde_json::from_value(json!({"secrets": {"password": "hunter2"}})).unwrap();
        let error = Grants::new(config, Path::new("/")).unwrap_err();
        assert!(!error.report().contains("hunter2"));
        assert!(error.report().contains("password"));
    }
}
