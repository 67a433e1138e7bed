//! One transaction: statements are gathered and sent together, and what each of them
//! must have found is looked at before COMMIT.

use std::collections::HashSet;

use bytes::BytesMut;
use tidegate_sdk::model::{Failure, Refusal};

use crate::connect::Stream;
use crate::error::{Error, of_rows};
use crate::metadata::{Metadata, Stored, read_stored};
use crate::protocol::{Answer, Ran};
use crate::session::{Session, fenced};

/// Statements gathered before they are sent, in bytes.
const SEND_AT: usize = 256 << 10;
/// Culprits named in one failure.
const MAX_REFUSALS: usize = 100;

/// Whose statement it is, for the failure it may end in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin {
    /// The table.
    pub table: Option<u32>,
    /// Ticket and index of the batch.
    pub ticket: u64,
    pub batch: u32,
    /// The only row it is about.
    pub row: Option<u32>,
}

impl Origin {
    /// A refusal of a row of this batch.
    pub fn refusal(&self, row: u32, column: Option<u16>, code: &str, message: &str) -> Refusal {
        Refusal {
            ticket: self.ticket,
            batch: self.batch,
            row,
            column,
            code: code.to_owned(),
            message: message.to_owned(),
        }
    }
}

struct Statement {
    origin: Origin,
    /// Rows of the batch it must find in the table, if it must.
    finds: Vec<u32>,
}

/// An open transaction. Left without `commit`, it is rolled back by `Session::settle`.
pub struct Transaction<'a, S> {
    session: &'a mut Session<S>,
    sql: String,
    statements: Vec<Statement>,
    what: &'static str,
    /// Staging tables made in it, which are there for later ones if it commits.
    staged: Vec<u32>,
    /// Tables whose staging table holds rows of an earlier batch; COMMIT empties it.
    filled: HashSet<u32>,
}

impl<'a, S: Stream> Transaction<'a, S> {
    /// Begins, with the lane's row locked and these tables' rows read and locked.
    pub fn begin(
        session: &'a mut Session<S>,
        metadata: &Metadata,
        tables: &[u32],
        what: &'static str,
    ) -> Result<(Transaction<'a, S>, Vec<Stored>), Failure> {
        let sql = format!("BEGIN; {}; {}", metadata.fence(), metadata.stored(tables));
        let answers = session.query(&sql, what, None)?;
        let [_, fence, stored] = answers.as_slice() else { return Err(odd_answer(session, what)) };
        if fence.rows.is_empty() {
            return Err(fenced());
        }
        let Some(stored) = read_stored(stored) else { return Err(odd_answer(session, what)) };
        Ok((
            Transaction {
                session,
                sql: String::new(),
                statements: Vec::new(),
                what,
                staged: Vec::new(),
                filled: HashSet::new(),
            },
            stored,
        ))
    }

    /// Gathers a statement.
    pub fn add(&mut self, sql: &str, origin: Origin) -> Result<(), Failure> {
        self.add_finding(sql, origin, Vec::new())
    }

    /// Gathers a statement that must find these rows of its batch in the table: as many as its count says, or
    /// those whose number it returns.
    pub fn add_finding(&mut self, sql: &str, origin: Origin, finds: Vec<u32>) -> Result<(), Failure> {
        if !self.sql.is_empty() {
            self.sql.push_str(";\n");
        }
        self.sql.push_str(sql);
        self.statements.push(Statement { origin, finds });
        if self.sql.len() >= SEND_AT { self.send() } else { Ok(()) }
    }

    /// Sends what was gathered, and looks at what it found.
    pub fn send(&mut self) -> Result<(), Failure> {
        if self.statements.is_empty() {
            return Ok(());
        }
        let ran = self.session.client.run(&self.sql);
        self.look(ran).map(|_| ())
    }

    /// Runs one query at once, after what was gathered.
    pub fn query(&mut self, sql: &str, table: u32) -> Result<Vec<Answer>, Failure> {
        self.send()?;
        self.session.query(sql, self.what, Some(table))
    }

    /// Sends what was gathered and a COPY. The failure of a line names the row of the
    /// same number.
    pub fn copy(
        &mut self,
        sql: &str,
        origin: Origin,
        fill: impl FnMut(&mut BytesMut) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        // The COPY is the last of them.
        if !self.sql.is_empty() {
            self.sql.push_str(";\n");
        }
        self.sql.push_str(sql);
        self.statements.push(Statement { origin, finds: Vec::new() });
        let (ran, broken) = self.session.client.copy_in(&self.sql, fill);
        match broken {
            // The server's answer to CopyFail is an error of ours, unless the connection went.
            Some(failure) if !ran.error.as_ref().is_some_and(Error::is_lost) => {
                self.session.answered = true;
                Err(failure)
            }
            _ => self.look(ran).map(|_| ()),
        }
    }

    /// Sends the rest and commits.
    pub fn commit(mut self) -> Result<(), Failure> {
        // What must be looked at first is not sent in one message with COMMIT.
        if self.statements.iter().any(|statement| !statement.finds.is_empty()) {
            self.send()?;
        }
        self.add("COMMIT", Origin::default())?;
        self.send()?;
        self.session.stages.extend(self.staged.drain(..));
        Ok(())
    }

    /// Whether the table's staging table is there for certain.
    pub fn is_staged(&self, table: u32) -> bool {
        self.session.stages.contains(&table) || self.staged.contains(&table)
    }

    /// Notes a staging table made in this transaction; which one to drop for it, if
    /// there are too many.
    pub fn note_staged(&mut self, table: u32, most: usize) -> Option<u32> {
        self.staged.push(table);
        if self.session.stages.len() + self.staged.len() > most { self.session.stages.pop_front() } else { None }
    }

    /// Notes that a staging table is filled; whether it was before in this transaction.
    pub fn fills_again(&mut self, table: u32) -> bool {
        !self.filled.insert(table)
    }

    /// Forgets that a table has a staging table.
    pub fn forget_staged(&mut self, table: u32) {
        self.session.stages.retain(|staged| *staged != table);
        self.staged.retain(|staged| *staged != table);
    }

    /// Matches answers with what was gathered.
    fn look(&mut self, ran: Ran) -> Result<(), Failure> {
        let statements = std::mem::take(&mut self.statements);
        self.sql.clear();
        if let Some(error) = ran.error {
            let origin = statements.get(ran.answers.len()).map(|statement| statement.origin).unwrap_or_default();
            return Err(self.blame(&error, origin));
        }
        self.session.answered = true;
        for (statement, answer) in statements.iter().zip(&ran.answers) {
            if answer.count < statement.finds.len() as u64 {
                return Err(not_found(statement, answer));
            }
        }
        Ok(())
    }

    fn blame(&mut self, error: &Error, origin: Origin) -> Failure {
        let mut culprits = Vec::new();
        if let Error::Server(server) = error {
            let line = server.copy_line().and_then(|line| line.checked_sub(1));
            culprits.extend(
                origin
                    .row
                    .or(line)
                    .map(|row| origin.refusal(row, None, &format!("postgres.{}", server.code), &server.to_string())),
            );
        }
        self.session.failure(error, self.what, origin.table, culprits)
    }
}

/// Rows that hold only some of their cells, and are not in the table.
fn not_found(statement: &Statement, answer: &Answer) -> Failure {
    let found: HashSet<u32> = answer.rows.iter().filter_map(|row| row.first()?.as_deref()?.parse().ok()).collect();
    let missing: Vec<u32> = statement.finds.iter().copied().filter(|row| !found.contains(row)).collect();
    let message = format!(
        "{} of the rows came without all of their cells (unchanged TOAST), and the table has no row to take the rest from",
        missing.len()
    );
    let rows = missing
        .iter()
        .take(MAX_REFUSALS)
        .map(|row| statement.origin.refusal(*row, None, "row-missing", "no such row in the table"));
    of_rows("row-missing", message, rows.collect())
}

fn odd_answer<S: Stream>(session: &mut Session<S>, what: &str) -> Failure {
    let error = Error::Protocol(
        "the server's answer, or a row of this plugin's own tables, is not what was written".to_owned(),
    );
    session.failure(&error, what, None, Vec::new())
}
