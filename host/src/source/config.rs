//! Where the source is and how it is reached: the URL of `[source]`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::error::{Error, Result};

/// PostgreSQL's default port.
const DEFAULT_PORT: u16 = 5432;
/// How long one attempt to connect may take unless the URL says otherwise: a
/// handshake over a slow link is well below, a dropped packet filter is not.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// NAMEDATALEN - 1: longer names are cut by the server without an error.
const NAME_BYTES: usize = 63;
/// What every slot of ours begins with.
const SLOT_PREFIX: &str = "tidegate_";
/// Parameters a URL may carry.
const PARAMETERS: [&str; 9] =
    ["host", "port", "user", "password", "dbname", "sslmode", "sslrootcert", "connect_timeout", "application_name"];

/// How much of TLS is asked for, in libpq's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// Plain text.
    Disable,
    /// TLS where the server offers it; unverified unless `sslrootcert` is given.
    Prefer,
    /// TLS; unverified unless `sslrootcert` is given.
    Require,
    /// TLS, and a chain to a known authority.
    VerifyCa,
    /// TLS, a chain to a known authority, and the name we dialled.
    VerifyFull,
}

impl SslMode {
    /// The modes by name, for the parser and its error.
    const NAMES: [(&'static str, SslMode); 5] = [
        ("disable", SslMode::Disable),
        ("prefer", SslMode::Prefer),
        ("require", SslMode::Require),
        ("verify-ca", SslMode::VerifyCa),
        ("verify-full", SslMode::VerifyFull),
    ];

    fn parse(text: &str) -> Result<SslMode> {
        SslMode::NAMES.iter().find(|(name, _)| *name == text).map(|(_, mode)| *mode).ok_or_else(|| {
            Error::usage("source.url", format!("source url: sslmode `{text}` is not known"))
                .next("Use disable, prefer, require, verify-ca or verify-full.")
        })
    }
}

/// A password: never printed.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Password(pub(super) String);

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<redacted>")
    }
}

/// Where the source is, who we are there, and what of it is replicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceConfig {
    /// Host name, address, or the directory of a unix socket (begins with `/`).
    pub host: String,
    /// TCP port, and the number in a unix socket's name.
    pub port: u16,
    /// Role.
    pub user: String,
    password: Option<Password>,
    /// Database.
    pub database: String,
    /// How much of TLS is asked for.
    pub sslmode: SslMode,
    /// PEM file of the authorities to trust instead of the system's.
    pub sslrootcert: Option<PathBuf>,
    /// Bound of one attempt: dialling, TLS and authentication together.
    pub connect_timeout: Duration,
    /// `application_name` of all our connections: `tidegate/<pipeline>`.
    pub application_name: String,
    /// Publication that says what is replicated.
    pub publication: String,
    /// Replication slot: `tidegate_<pipeline>`.
    pub slot: String,
    /// Whether large transactions are taken before they end, where the server can.
    pub streaming: bool,
}

impl SourceConfig {
    /// Reads `postgres://user:pass@host:port/db?parameter=value&…`.
    ///
    /// Nothing is taken from the environment. Errors: `source.url`,
    /// `source.url-parameter`, `pipeline.name`, `source.publication-name`; none
    /// repeats the URL, for it holds the password.
    pub fn parse(url: &str, publication: &str, pipeline: &str) -> Result<SourceConfig> {
        let slot = slot_name(pipeline)?;
        if publication.is_empty() || publication.len() > NAME_BYTES || publication.contains('\0') {
            return Err(Error::usage(
                "source.publication-name",
                format!("publication `{publication}`: a name has 1 to {NAME_BYTES} bytes"),
            )
            .next("Set `publication` in [source] to the name of a publication of that database."));
        }
        let parts = UrlParts::read(url)?;
        let host = parts.host.ok_or_else(|| {
            Error::usage("source.url", "source url: there is no host in it")
                .next("Write postgres://user@host:port/database, or ?host=/directory for a unix socket.")
        })?;
        let user = parts.user.ok_or_else(|| {
            Error::usage("source.url", "source url: there is no user in it")
                .next("Write postgres://user@host:port/database; nothing is taken from the environment.")
        })?;
        let socket = host.starts_with('/');
        Ok(SourceConfig {
            port: parts.port.unwrap_or(DEFAULT_PORT),
            database: parts.database.unwrap_or_else(|| user.clone()),
            user,
            password: parts.password.map(Password),
            sslmode: match parts.sslmode {
                _ if socket => SslMode::Disable,
                Some(mode) => mode,
                None => SslMode::VerifyFull,
            },
            sslrootcert: parts.sslrootcert,
            connect_timeout: parts.connect_timeout.unwrap_or(DEFAULT_CONNECT_TIMEOUT),
            application_name: parts.application_name.unwrap_or_else(|| format!("tidegate/{pipeline}")),
            host,
            publication: publication.to_owned(),
            slot,
            streaming: true,
        })
    }

    /// The same with this password.
    pub fn with_password(mut self, password: String) -> SourceConfig {
        self.password = Some(Password(password));
        self
    }

    pub(super) fn password(&self) -> Option<&str> {
        self.password.as_ref().map(|password| password.0.as_str())
    }

    /// Whether the host is the directory of a unix socket.
    pub(super) fn is_socket(&self) -> bool {
        self.host.starts_with('/')
    }

    /// `user@host:port/database`: names the server in messages, without the password.
    pub fn endpoint(&self) -> String {
        format!("{}@{}:{}/{}", self.user, self.host, self.port, self.database)
    }
}

/// The slot of a pipeline: names are taken as they are, so that `p1` is never
/// mistaken for another pipeline by folding or cutting.
fn slot_name(pipeline: &str) -> Result<String> {
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    let slot = format!("{SLOT_PREFIX}{pipeline}");
    if pipeline.is_empty() || !pipeline.bytes().all(legal) || slot.len() > NAME_BYTES {
        let most = NAME_BYTES - SLOT_PREFIX.len();
        return Err(Error::usage(
            "pipeline.name",
            format!("pipeline `{pipeline}`: its name becomes a replication slot's and cannot be one"),
        )
        .next(format!("Use 1 to {most} lower-case letters, digits and underscores.")));
    }
    Ok(slot)
}

/// What a URL said, before defaults.
#[derive(Default)]
struct UrlParts {
    host: Option<String>,
    port: Option<u16>,
    user: Option<String>,
    password: Option<String>,
    database: Option<String>,
    sslmode: Option<SslMode>,
    sslrootcert: Option<PathBuf>,
    connect_timeout: Option<Duration>,
    application_name: Option<String>,
}

impl UrlParts {
    /// Split by hand: `url::Url` refuses `%2F` in a host, which libpq takes for a
    /// socket directory.
    fn read(url: &str) -> Result<UrlParts> {
        let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://")).ok_or_else(|| {
            Error::usage("source.url", "source url: it does not begin with postgres:// or postgresql://")
                .next("Write postgres://user:password@host:port/database.")
        })?;
        let rest = rest.split_once('#').map_or(rest, |(before, _)| before);
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, address) = authority.rsplit_once('@').unwrap_or(("", authority));
        let mut parts = UrlParts::default();
        let (user, password) = login.split_once(':').map_or((login, None), |(user, password)| (user, Some(password)));
        parts.user = filled(decode("user", user)?);
        parts.password = password.map(|text| decode("password", text)).transpose()?;
        parts.read_address(address)?;
        parts.database = filled(decode("database", path)?);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            parts.set(&decode("parameter", name)?, decode(name, value)?)?;
        }
        Ok(parts)
    }

    fn read_address(&mut self, address: &str) -> Result<()> {
        if address.contains(',') {
            return Err(Error::usage("source.url", "source url: it names several hosts")
                .next("Name the primary alone; other hosts are not tried."));
        }
        let (host, port) = match address.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(|| {
                    Error::usage("source.url", "source url: `[` without `]`").next("Close the IPv6 address with `]`.")
                })?;
                (host, after.strip_prefix(':'))
            }
            None => address.rsplit_once(':').map_or((address, None), |(host, port)| (host, Some(port))),
        };
        self.host = filled(decode("host", host)?);
        self.port = port.filter(|port| !port.is_empty()).map(parse_port).transpose()?;
        Ok(())
    }

    fn set(&mut self, name: &str, value: String) -> Result<()> {
        match name {
            "host" => self.host = filled(value),
            "port" => self.port = Some(parse_port(&value)?),
            "user" => self.user = filled(value),
            "password" => self.password = Some(value),
            "dbname" => self.database = filled(value),
            "sslmode" => self.sslmode = Some(SslMode::parse(&value)?),
            "sslrootcert" if value != "system" => self.sslrootcert = Some(PathBuf::from(value)),
            "sslrootcert" => self.sslrootcert = None,
            "connect_timeout" => {
                let seconds: u32 = value.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| {
                    Error::usage(
                        "source.url",
                        format!("source url: connect_timeout `{value}` is not a number of seconds"),
                    )
                    .next("Write a whole number of seconds, 1 or more.")
                })?;
                self.connect_timeout = Some(Duration::from_secs(seconds.into()));
            }
            "application_name" => self.application_name = filled(value),
            unknown => return Err(unknown_parameter(unknown)),
        }
        Ok(())
    }
}

fn unknown_parameter(name: &str) -> Error {
    let nearest = PARAMETERS
        .iter()
        .map(|known| (strsim::jaro_winkler(name, known), known))
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .filter(|(likeness, _)| *likeness > 0.7);
    let next = match nearest {
        Some((_, known)) => format!("Did you mean `{known}`? Known are {}.", PARAMETERS.join(", ")),
        None => format!("Remove it; known are {}.", PARAMETERS.join(", ")),
    };
    Error::usage("source.url-parameter", format!("source url: parameter `{name}` is not known")).next(next)
}

fn parse_port(text: &str) -> Result<u16> {
    text.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
        Error::usage("source.url", format!("source url: `{text}` is not a port"))
            .next("Write a number from 1 to 65535; percent-encode `:`, `/` and `@` in user and password.")
    })
}

fn filled(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

fn decode(what: &str, text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8().ok().filter(|text| !text.contains('\0'));
    decoded.map(|text| text.into_owned()).ok_or_else(|| {
        Error::usage("source.url", format!("source url: its {what} is not UTF-8 after percent-decoding"))
            .next("Percent-encode the bytes of its UTF-8 form.")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<SourceConfig> {
        SourceConfig::parse(url, "shop", "shop")
    }

    #[test]
    fn a_url_is_read_with_its_defaults() {
        let config = parse("postgres://me:p%40ss%3Aw@db.example:6543/shop%20db").unwrap();
        assert_eq!((config.host.as_str(), config.port), ("db.example", 6543));
        assert_eq!(config.password(), Some("p@ss:w"));
        assert_eq!(config.database, "shop db");
        assert_eq!(config.sslmode, SslMode::VerifyFull);
        assert_eq!(config.application_name, "tidegate/shop");
        assert_eq!(config.slot, "tidegate_shop");
        assert_eq!(parse("postgresql://me@[::1]/d").unwrap().host, "::1");
        assert_eq!(parse("postgres://me@h").unwrap().database, "me");
    }

    #[test]
    fn a_unix_socket_is_named_either_way_and_has_no_tls() {
        for url in ["postgres://me@%2Frun%2Fpg/d?sslmode=verify-full", "postgres://me@/d?host=/run/pg&port=5433"] {
            let config = parse(url).unwrap();
            assert_eq!(config.host, "/run/pg");
            assert_eq!(config.sslmode, SslMode::Disable);
        }
    }

    #[test]
    fn an_unknown_parameter_is_refused_with_the_nearest_known_one() {
        let error = parse("postgres://me@h/d?sslmod=require").unwrap_err();
        assert_eq!(error.code(), "source.url-parameter");
        assert!(error.next_step().unwrap().contains("`sslmode`"));
    }

    #[test]
    fn no_error_and_no_debug_shows_the_password() {
        let config = parse("postgres://me:hunter2@h/d").unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
        for url in ["postgres://me:hunter2@h:x/d", "postgres://me:hunter2@h/d?sslmode=x", "http://me:hunter2@h"] {
            assert!(!parse(url).unwrap_err().report().contains("hunter2"), "{url}");
        }
    }

    #[test]
    fn a_pipeline_whose_name_is_no_slot_name_is_refused() {
        for name in ["", "Shop", "shop-1", "läden", &"x".repeat(55)] {
            assert_eq!(SourceConfig::parse("postgres://me@h", "p", name).unwrap_err().code(), "pipeline.name");
        }
        assert!(SourceConfig::parse("postgres://me@h", "p", &"x".repeat(54)).is_ok());
    }
}
