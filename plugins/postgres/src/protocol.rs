//! A synchronous client of PostgreSQL's protocol, version 3: as much as this plugin uses.
//!
//! Statements go by the simple query protocol, several in one message where nothing has
//! to be looked at between them; values in them are quoted by `sql::literal`.

use bytes::{BufMut, BytesMut};
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::{DataRowBody, ErrorResponseBody, Header, Message};
use postgres_protocol::message::frontend;

use crate::auth;
use crate::connect::Stream;
use crate::error::{Error, ServerError};
use crate::settings::{Settings, SslMode};

/// Largest message taken from the server. What we ask for is small: names and counts.
const MAX_MESSAGE: usize = 16 << 20;
/// COPY data is handed to the stream in pieces of about this size.
const COPY_BUFFER: usize = 256 << 10;
/// What one read asks the stream for.
const READ_SIZE: usize = 16 << 10;

/// What one statement gave.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Rows as text; none for statements that return none.
    pub rows: Vec<Vec<Option<String>>>,
    /// The number at the end of the command tag: rows inserted, updated, deleted, ...
    pub count: u64,
}

/// What statements sent together gave.
#[derive(Debug)]
pub struct Ran {
    /// Of those that succeeded, in order.
    pub answers: Vec<Answer>,
    /// Why the next one did not.
    pub error: Option<Error>,
}

/// A session with a server.
pub struct Client<S> {
    stream: S,
    input: BytesMut,
    output: BytesMut,
    /// Status of the last ReadyForQuery: `I`, `T` or `E`.
    status: u8,
}

impl<S: Stream> Client<S> {
    /// TLS if wanted, start-up and login over a stream just dialled.
    pub fn start(
        mut stream: S,
        settings: &Settings,
        application: &str,
        password: &dyn Fn() -> Result<String, String>,
    ) -> Result<Client<S>, Error> {
        let encrypted = settings.sslmode != SslMode::Disable;
        if encrypted {
            request_tls(&mut stream)?;
        }
        let mut client = Client { stream, input: BytesMut::new(), output: BytesMut::new(), status: b'I' };
        let parameters = [
            ("user", settings.user.as_str()),
            ("database", settings.database.as_str()),
            ("client_encoding", "UTF8"),
            ("application_name", application),
        ];
        client.send(|out| frontend::startup_message(parameters, out).map_err(Error::from))?;
        auth::authenticate(&mut client, &settings.user, encrypted, password)?;
        loop {
            match client.receive()? {
                Message::BackendKeyData(_) => {}
                Message::ReadyForQuery(body) => {
                    client.status = body.status();
                    return Ok(client);
                }
                Message::ErrorResponse(body) => return Err(server_error(&body)),
                _ => return Err(unexpected("at the start of the session")),
            }
        }
    }

    /// Whether a transaction is open, failed or not.
    pub fn in_transaction(&self) -> bool {
        self.status != b'I'
    }

    /// The server's certificate, for channel binding.
    pub fn peer_certificate(&self) -> Option<Vec<u8>> {
        self.stream.peer_certificate()
    }

    /// Runs statements and gives all their answers, or the error.
    pub fn query(&mut self, sql: &str) -> Result<Vec<Answer>, Error> {
        let ran = self.run(sql);
        ran.error.map_or(Ok(ran.answers), Err)
    }

    /// Runs statements, one answer for each that succeeded. After an error the rest of
    /// them did not run.
    pub fn run(&mut self, sql: &str) -> Ran {
        match self.send(|out| frontend::query(sql, out).map_err(Error::from)) {
            Ok(()) => self.answers(),
            Err(error) => Ran { answers: Vec::new(), error: Some(error) },
        }
    }

    /// Runs statements of which the last is `COPY … FROM STDIN`. `fill` appends a row in
    /// text format and says whether there are more; its own error breaks the COPY off.
    pub fn copy_in<E>(
        &mut self,
        sql: &str,
        mut fill: impl FnMut(&mut BytesMut) -> Result<bool, E>,
    ) -> (Ran, Option<E>) {
        match self.send_copy(sql, &mut fill) {
            Ok(broken) => (self.answers(), broken),
            Err(error) => (Ran { answers: Vec::new(), error: Some(error) }, None),
        }
    }

    /// Nothing is awaited between the statement and its rows: a server that refuses the
    /// statement ignores them.
    fn send_copy<E>(
        &mut self,
        sql: &str,
        fill: &mut impl FnMut(&mut BytesMut) -> Result<bool, E>,
    ) -> Result<Option<E>, Error> {
        frontend::query(sql, &mut self.output)?;
        loop {
            match self.copy_message(fill) {
                Ok(true) => self.flush()?,
                Ok(false) => {
                    frontend::copy_done(&mut self.output);
                    self.flush()?;
                    return Ok(None);
                }
                Err(error) => {
                    frontend::copy_fail("a row cannot be written", &mut self.output)?;
                    self.flush()?;
                    return Ok(Some(error));
                }
            }
        }
    }

    /// One CopyData message of about `COPY_BUFFER`, written in place.
    fn copy_message<E>(&mut self, fill: &mut impl FnMut(&mut BytesMut) -> Result<bool, E>) -> Result<bool, E> {
        let start = self.output.len();
        self.output.put_u8(b'd');
        self.output.put_u32(0);
        loop {
            match fill(&mut self.output) {
                Ok(true) if self.output.len() - start < COPY_BUFFER => {}
                Ok(more) => {
                    // A row is under 1 GB, so the length fits.
                    let length = (self.output.len() - start - 1) as u32;
                    self.output[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
                    return Ok(more);
                }
                Err(error) => {
                    self.output.truncate(start);
                    return Err(error);
                }
            }
        }
    }

    /// Says good-bye; errors do not matter any more.
    pub fn terminate(mut self) {
        frontend::terminate(&mut self.output);
        let _ = self.flush();
    }

    /// Everything up to ReadyForQuery. The first error wins.
    fn answers(&mut self) -> Ran {
        let mut ran = Ran { answers: Vec::new(), error: None };
        let mut current = Answer::default();
        loop {
            match self.answer(&mut ran, &mut current) {
                Ok(true) => {}
                Ok(false) => return ran,
                // A FATAL error is the last thing the server says.
                Err(lost) => {
                    ran.error = ran.error.or(Some(lost));
                    return ran;
                }
            }
        }
    }

    /// Takes one message of an answer; false at its end.
    fn answer(&mut self, ran: &mut Ran, current: &mut Answer) -> Result<bool, Error> {
        match self.receive()? {
            Message::RowDescription(_) | Message::CopyInResponse(_) => {}
            Message::DataRow(body) => current.rows.push(texts(&body)?),
            Message::CommandComplete(body) => {
                current.count = body.tag()?.rsplit(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0);
                ran.answers.push(std::mem::take(current));
            }
            Message::EmptyQueryResponse => ran.answers.push(std::mem::take(current)),
            Message::ErrorResponse(body) => {
                ran.error.get_or_insert_with(|| server_error(&body));
            }
            Message::ReadyForQuery(body) => {
                self.status = body.status();
                return Ok(false);
            }
            _ => return Err(unexpected("in answer to a statement")),
        }
        Ok(true)
    }

    /// Writes and sends one message.
    pub fn send(&mut self, write: impl FnOnce(&mut BytesMut) -> Result<(), Error>) -> Result<(), Error> {
        write(&mut self.output)?;
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.stream.write_all(&self.output)?;
        self.output.clear();
        self.stream.flush()?;
        Ok(())
    }

    /// The next message that says something: notices and parameters are passed over.
    pub fn receive(&mut self) -> Result<Message, Error> {
        loop {
            while !self.has_message()? {
                self.fill()?;
            }
            match Message::parse(&mut self.input)? {
                Some(Message::NoticeResponse(_) | Message::ParameterStatus(_) | Message::NotificationResponse(_)) => {}
                Some(message) => return Ok(message),
                None => self.fill()?,
            }
        }
    }

    fn has_message(&self) -> Result<bool, Error> {
        let Some(header) = Header::parse(&self.input)? else { return Ok(false) };
        // The length counts itself, not the tag.
        let length = usize::try_from(header.len()).unwrap_or(usize::MAX);
        if length > MAX_MESSAGE {
            return Err(Error::Protocol(format!(
                "the server sends a message of {length} bytes; this plugin takes {MAX_MESSAGE}"
            )));
        }
        Ok(self.input.len() > length)
    }

    fn fill(&mut self) -> Result<(), Error> {
        let start = self.input.len();
        self.input.resize(start + READ_SIZE, 0);
        let read = self.stream.read(&mut self.input[start..]);
        self.input.truncate(start + *read.as_ref().unwrap_or(&0));
        match read? {
            0 => Err(Error::Io(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "the server closed the connection",
            ))),
            _ => Ok(()),
        }
    }
}

/// SSLRequest. The one byte of the answer is read alone: anything behind it came
/// before the handshake and is not from the server.
fn request_tls<S: Stream>(stream: &mut S) -> Result<(), Error> {
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    stream.write_all(&request)?;
    stream.flush()?;
    let mut answer = [0; 1];
    stream.read_exact(&mut answer)?;
    match answer[0] {
        b'S' => Ok(stream.start_tls()?),
        b'N' => Err(Error::NoTls(
            "the server does not speak TLS: switch it on there, or set `sslmode` to \"disable\"".to_owned(),
        )),
        _ => Err(unexpected("in answer to the request for TLS")),
    }
}

fn texts(body: &DataRowBody) -> Result<Vec<Option<String>>, Error> {
    let mut ranges = body.ranges();
    let mut row = Vec::new();
    while let Some(range) = ranges.next()? {
        row.push(match range {
            None => None,
            Some(range) => match std::str::from_utf8(&body.buffer()[range]) {
                Ok(text) => Some(text.to_owned()),
                Err(_) => return Err(Error::Protocol("the server sends text that is not UTF-8".to_owned())),
            },
        });
    }
    Ok(row)
}

/// The fields of an ErrorResponse that we use.
pub fn server_error(body: &ErrorResponseBody) -> Error {
    let mut error = ServerError::default();
    let mut fields = body.fields();
    // A malformed field ends the list; what came before it is still the answer.
    while let Ok(Some(field)) = fields.next() {
        let value = String::from_utf8_lossy(field.value_bytes()).into_owned();
        match field.type_() {
            b'C' => error.code = value,
            b'M' => error.message = value,
            b'D' => error.detail = value,
            b'W' => error.context = value,
            _ => {}
        }
    }
    Error::Server(Box::new(error))
}

fn unexpected(place: &str) -> Error {
    Error::Protocol(format!("the server sends an unexpected message {place}"))
}
