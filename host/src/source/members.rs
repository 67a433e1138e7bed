//! Who is in the publication, and by what.

use std::collections::BTreeMap;
use std::fmt::Write;

use tokio_postgres::{Client, Row};

use super::errors::{self, sql_error};
use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::schema::table::TableName;

const MEMBERS: &str = concat!(include_str!("sql/published.sql"), include_str!("sql/members.sql"));

/// The membership of a publication.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Members {
    /// The publication itself.
    pub publication: Publication,
    /// The log reached to here at least after the look: who was seen to be gone is gone
    /// there.
    pub at: Lsn,
    /// By `pg_class.oid`.
    pub tables: BTreeMap<u32, Member>,
}

/// The row of `pg_publication`, as far as rows of tables can be missed by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Publication {
    /// `pg_publication.oid`.
    pub oid: u32,
    /// Its name.
    pub name: String,
    /// What it publishes: some of `i`, `u`, `d` and `t`, for insert, update, delete and
    /// truncate.
    pub publish: String,
    /// `xmin` of the row: another one is an ALTER PUBLICATION of it.
    pub xmin: String,
}

/// One published table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: TableName,
    /// The catalog rows that make it a member: other rows mean that it may have been out
    /// in between (P21).
    pub key: String,
    /// What is below it, if it is a root that is published as itself (P22).
    pub partitions: Option<Partitions>,
}

/// What is below a root, leaves or not, by `pg_class.oid`.
pub type Partitions = BTreeMap<u32, Partition>;

/// A partition, by what tells whether it is still the same rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Partition {
    /// `pg_class.relfilenode`: another one is a TRUNCATE or a rewrite. 0: it has none.
    pub file: u32,
    /// `xmin` of its row of `pg_inherits`: another one is an ATTACH.
    pub link: u32,
    /// `xmin` of its row of `pg_class`: who gave it this file, if nobody changed it since.
    /// Not stored.
    pub changed: u32,
}

/// How what is below a root differs from what was known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Were not there.
    pub come: Vec<u32>,
    /// Are not there any more, or were not there in between.
    pub gone: Vec<u32>,
    /// Have another file, and who changed them last.
    pub rewritten: Vec<(u32, u32)>,
}

impl Publication {
    /// Under which the publication's own row is stored, among the tables: no table has it.
    pub const STORED_AS: u32 = 0;

    /// As it is stored.
    pub fn stored(&self) -> String {
        format!("{} {} {} {}", self.oid, self.xmin, self.publish, self.name)
    }

    /// The one that was stored.
    pub fn parse(stored: &str) -> Option<Publication> {
        let mut parts = stored.splitn(4, ' ');
        Some(Publication {
            oid: parts.next()?.parse().ok()?,
            xmin: parts.next()?.to_owned(),
            publish: parts.next()?.to_owned(),
            name: parts.next()?.to_owned(),
        })
    }

    /// Publishes what both do.
    pub fn narrow(&mut self, publish: &str) {
        self.publish.retain(|kind| publish.contains(kind));
    }

    /// Why changes may have been missed between this look and a later one that found
    /// `found`: then it published less than it does now. Without the trigger (`seen` is
    /// false) nobody told what it was in between, and any ALTER PUBLICATION of it but a
    /// rename may have done that.
    pub fn missed(&self, found: &Publication, seen: bool) -> Option<String> {
        if self.oid != found.oid {
            // All is copied again anyway.
            return None;
        }
        let names = |kinds: &str| {
            let name = |kind| match kind {
                'i' => "inserts",
                'u' => "updates",
                'd' => "deletes",
                _ => "truncations",
            };
            kinds.chars().map(name).collect::<Vec<_>>().join(", ")
        };
        let more: String = found.publish.chars().filter(|kind| !self.publish.contains(*kind)).collect();
        if !more.is_empty() {
            return Some(format!("the publication left out {} for a time", names(&more)));
        }
        let altered = !seen && self.xmin != found.xmin && self.name == found.name && self.publish == found.publish;
        altered.then(|| "the publication was altered, and what it left out in between nobody saw".to_owned())
    }

    /// What is wrong with it now, if anything.
    pub fn complaint(&self) -> Option<Error> {
        let kinds = [('i', "insert"), ('u', "update"), ('d', "delete"), ('t', "truncate")];
        let left_out: Vec<&str> =
            kinds.iter().filter(|(kind, _)| !self.publish.contains(*kind)).map(|(_, name)| *name).collect();
        (!left_out.is_empty()).then(|| errors::publication_publish(&self.name, &left_out.join(", ")))
    }
}

impl Members {
    /// With the partitions as they were when the last process looked: the first look of
    /// this one finds what became of them since (P22).
    pub fn with_stored(mut self, stored: &BTreeMap<u32, String>) -> Members {
        for (oid, member) in &mut self.tables {
            if let Some(stored) = stored.get(oid) {
                *member = member.with_stored(stored);
            }
        }
        self
    }
}

impl Member {
    /// As it is stored.
    pub fn stored(&self) -> String {
        let mut text = self.key.clone();
        if let Some(partitions) = &self.partitions {
            text.push('\n');
            for (oid, partition) in partitions {
                // Writing to a String does not fail.
                let _ = write!(text, "{oid}:{}:{} ", partition.file, partition.link);
            }
        }
        text
    }

    /// Whether it is a member by the same rows as when it was stored.
    pub fn is_same(&self, stored: &str) -> bool {
        stored.split('\n').next() == Some(self.key.as_str())
    }

    /// With the partitions that were stored: what they differ in is still to be found.
    pub fn with_stored(&self, stored: &str) -> Member {
        let partitions = match (&self.partitions, stored.split_once('\n')) {
            (Some(_), Some((_, text))) if self.is_same(stored) => text.split_whitespace().map(parse).collect(),
            _ => self.partitions.clone(),
        };
        Member { partitions, ..self.clone() }
    }
}

fn parse(text: &str) -> Option<(u32, Partition)> {
    let mut numbers = text.split(':').map(|number| number.parse().ok());
    let (oid, file, link) = (numbers.next()??, numbers.next()??, numbers.next()??);
    Some((oid, Partition { file, link, changed: 0 }))
}

/// How one look differs from another; none if it does not.
pub fn difference(known: Option<&Partitions>, found: Option<&Partitions>) -> Option<Difference> {
    let empty = Partitions::new();
    let (known, found) = (known.unwrap_or(&empty), found.unwrap_or(&empty));
    let mut difference = Difference::default();
    for (oid, partition) in found {
        match known.get(oid) {
            None => difference.come.push(*oid),
            Some(before) if before.link != partition.link => difference.gone.push(*oid),
            Some(before) if before.file != partition.file => difference.rewritten.push((*oid, partition.changed)),
            Some(_) => {}
        }
    }
    difference.gone.extend(known.keys().filter(|oid| !found.contains_key(oid)));
    (difference != Difference::default()).then_some(difference)
}

const DIGESTS: &str = concat!(include_str!("sql/published.sql"), include_str!("sql/digests.sql"));

/// By oid, what changes with whatever a picture of the table may show.
///
/// Errors: `source.sql`, `source.connection-lost`.
pub async fn digests(client: &Client, publication: &str) -> Result<Vec<(u32, String)>> {
    let rows = client.query(DIGESTS, &[&publication]).await;
    let rows = rows.map_err(|error| sql_error(&error, "looking for changes of tables"))?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Looks who is in the publication now.
///
/// Errors: `publication.gap`, `source.sql`, `source.connection-lost`.
pub async fn members(client: &Client, publication: &str) -> Result<Members> {
    let doing = |error| sql_error(&error, "looking who is in the publication");
    let rows = client.query(MEMBERS, &[&publication]).await.map_err(doing)?;
    let Some(first) = rows.first() else { return Err(errors::publication_gap(publication)) };
    Ok(Members {
        publication: Publication {
            oid: first.get(0),
            name: publication.to_owned(),
            publish: first.get(10),
            xmin: first.get(11),
        },
        at: reached(client).await?,
        tables: rows.iter().filter_map(member).collect(),
    })
}

/// The log reached to here at least before this returns.
///
/// Errors: `source.sql`, `source.connection-lost`.
pub async fn reached(client: &Client) -> Result<Lsn> {
    log_at(client, "pg_current_wal_insert_lsn()").await
}

/// How far the log is: at a standby what was replayed, else what this expression says.
///
/// Errors: `source.sql`, `source.connection-lost`.
pub(super) async fn log_at(client: &Client, at_primary: &str) -> Result<Lsn> {
    let sql = format!("SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE {at_primary} END::text");
    let row = client.query_one(&sql, &[]).await;
    let row = row.map_err(|error| sql_error(&error, "asking how far the log is"))?;
    row.get::<_, &str>(0).parse().map_err(errors::protocol)
}

fn member(row: &Row) -> Option<(u32, Member)> {
    let oid: u32 = row.get::<_, Option<u32>>(1)?;
    let name = TableName::new(row.get::<_, &str>(2), row.get::<_, &str>(3));
    let partitions = row.get::<_, bool>(5).then(|| partitions(row));
    Some((oid, Member { name, key: row.get(4), partitions }))
}

fn partitions(row: &Row) -> Partitions {
    let oids = row.get::<_, Option<Vec<u32>>>(6).unwrap_or_default();
    let files = row.get::<_, Option<Vec<u32>>>(7).unwrap_or_default();
    // Transaction ids have 32 bits; only their equality counts.
    let xids = |index: usize| {
        let xids = row.get::<_, Option<Vec<i64>>>(index).unwrap_or_default();
        xids.into_iter().map(|xid| xid as u32)
    };
    let partitions = files.into_iter().zip(xids(8)).zip(xids(9));
    let partitions = partitions.map(|((file, link), changed)| Partition { file, link, changed });
    oids.into_iter().zip(partitions).collect()
}

/// Which of these partitions of a root may have rows that never were changes of the root,
/// with their names (P22). Waits for who holds one that was attached.
///
/// Errors: `source.sql`, `source.lock-timeout`, `source.connection-lost`.
pub async fn strange_leaves(client: &Client, root: u32, partitions: &[u32]) -> Result<Vec<(u32, String)>> {
    let rows = client.query(include_str!("sql/strange_leaves.sql"), &[&root, &partitions]).await;
    let rows = rows.map_err(|error| sql_error(&error, "looking at the partitions of a table"))?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(partitions: &[(u32, u32, u32)]) -> Member {
        let partition =
            |(oid, file, link): &(u32, u32, u32)| (*oid, Partition { file: *file, link: *link, changed: 9 });
        Member {
            name: TableName::new("public", "root"),
            key: "table 5 6".to_owned(),
            partitions: Some(partitions.iter().map(partition).collect()),
        }
    }

    #[test]
    fn what_is_below_a_root_is_compared_with_what_was_stored_and_told_apart() {
        let before = root(&[(1, 11, 7), (2, 12, 7), (3, 13, 7), (4, 14, 7)]);
        let now = root(&[(1, 11, 7), (2, 99, 7), (3, 13, 8), (5, 15, 8)]);
        assert!(now.is_same(&before.stored()));
        let known = now.with_stored(&before.stored());
        let found = difference(known.partitions.as_ref(), now.partitions.as_ref()).unwrap();
        assert_eq!(found, Difference { come: vec![5], gone: vec![3, 4], rewritten: vec![(2, 9)] });
        let same = before.with_stored(&before.stored());
        assert_eq!(difference(same.partitions.as_ref(), before.partitions.as_ref()), None);
    }

    #[test]
    fn a_publication_that_published_less_in_between_has_missed_changes() {
        let row = |publish: &str, xmin: &str, name: &str| Publication {
            oid: 5,
            name: name.to_owned(),
            publish: publish.to_owned(),
            xmin: xmin.to_owned(),
        };
        let whole = row("iudt", "7", "p q");
        assert_eq!(Publication::parse(&whole.stored()).as_ref(), Some(&whole));
        assert_eq!(Publication::parse(&row("", "7", "p").stored()), Some(row("", "7", "p")));
        assert_eq!(Publication::parse("iudt"), None);
        assert_eq!(whole.missed(&whole, false), None);
        // Less, and then more again.
        let less = row("i", "8", "p q");
        assert_eq!(whole.missed(&less, true), None);
        assert_eq!(
            less.missed(&row("iut", "9", "p q"), true).unwrap(),
            "the publication left out updates, truncations for a time"
        );
        let mut told = whole.clone();
        told.narrow("id");
        assert!(told.missed(&row("iudt", "9", "p q"), true).is_some());
        // Nobody told.
        assert!(whole.missed(&row("iudt", "9", "p q"), false).is_some());
        assert_eq!(whole.missed(&row("iudt", "9", "p q"), true), None);
        assert_eq!(whole.missed(&row("iudt", "9", "renamed"), false), None);
        assert!(less.complaint().unwrap().message().contains("update, delete, truncate"));
        assert!(whole.complaint().is_none());
    }

    #[test]
    fn a_member_by_other_rows_or_without_stored_partitions_is_as_it_is_found() {
        let now = root(&[(1, 11, 7)]);
        let other = Member { key: "table 5 7".to_owned(), ..root(&[]) };
        assert!(!now.is_same(&other.stored()));
        assert_eq!(now.with_stored(&other.stored()), now);
        assert_eq!(now.with_stored("table 5 6"), now);
        let plain = Member { partitions: None, ..now };
        assert_eq!(plain.stored(), "table 5 6");
    }
}
