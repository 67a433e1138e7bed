//! A server that keeps changes waiting, so that somebody can be killed meanwhile.

use std::path::{Path, PathBuf};

use tidegate_tests::Database;

/// Where a change is kept waiting, once at each place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// Before each statement.
    Before,
    /// After each statement.
    After,
    /// In its commit.
    Commit,
}

impl At {
    /// As the fixture `steps` knows it.
    pub fn as_str(self) -> &'static str {
        match self {
            At::Before => "before",
            At::After | At::Commit => "after",
        }
    }
}

/// Longer than anybody takes to be killed: who goes on was not.
const SECONDS: u32 = 60;

/// What the server has noted, in files, which no rollback takes away: each is named by the
/// table's oid, and by where in its changes.
pub struct Stalls(PathBuf);

impl Stalls {
    /// Of a pipeline in this directory.
    pub fn of(pipeline: &Path) -> Stalls {
        Stalls(pipeline.join("stalls"))
    }

    /// Lets the server do it from here on. Whoever is killed leaves a session that the next
    /// one ends, and what it waited in with it.
    pub fn begin(&self, server: &Database, at: At) {
        std::fs::create_dir(&self.0).expect("a directory can be made");
        let mode = |path: &Path, mode: u32| {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, permissions).expect("its mode can be set");
        };
        mode(&self.0, 0o777);
        mode(self.0.parent().expect("it has one"), 0o755);
        server.script(&match at {
            At::Before => self.at_statements("ddl_command_start"),
            At::After => self.at_statements("ddl_command_end"),
            At::Commit => self.at_commits(),
        });
    }

    fn at_statements(&self, event: &str) -> String {
        let once = self.once(
            "(SELECT p.table_id FROM tidegate.position p, regexp_match(current_query(), 'ALTER TABLE \"([^\"]+)\"\\.\"([^\"]+)\"') at
              WHERE (p.target_schema, p.target_name) = (at[1], at[2]))",
            "current_query()",
        );
        format!(
            "CREATE FUNCTION public.stall() RETURNS event_trigger LANGUAGE plpgsql AS $$ {once} $$;
             CREATE EVENT TRIGGER stall ON {event} WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION public.stall();
             ALTER EVENT TRIGGER stall ENABLE ALWAYS;"
        )
    }

    fn at_commits(&self) -> String {
        let once = self.once("NEW.table_id", "concat(NEW.snapshot_commit, ' ', NEW.snapshot_message)");
        format!(
            "CREATE FUNCTION public.stall() RETURNS trigger LANGUAGE plpgsql AS $$ {once} $$;
             CREATE CONSTRAINT TRIGGER stall AFTER UPDATE ON tidegate.position DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
                 WHEN ((OLD.snapshot_commit, OLD.snapshot_message) IS DISTINCT FROM (NEW.snapshot_commit, NEW.snapshot_message))
                 EXECUTE FUNCTION public.stall();
             ALTER TABLE tidegate.position ENABLE ALWAYS TRIGGER stall;"
        )
    }

    fn once(&self, table: &str, key: &str) -> String {
        let returns = if key.contains("NEW.") { "RETURN NULL;" } else { "" };
        format!(
            "DECLARE place text := '{}/' || coalesce({table}::text, 'none') || '.' || md5({key});
             BEGIN
                 IF pg_stat_file(place, true) IS NULL THEN
                     EXECUTE format('COPY (SELECT 1) TO %L', place);
                     PERFORM pg_sleep({SECONDS});
                     EXECUTE format('COPY (SELECT 1) TO %L', place || '.survived');
                 END IF;
                 {returns}
             END",
            self.0.display()
        )
    }

    /// How often a change was kept waiting.
    pub fn begun(&self) -> usize {
        self.names().iter().filter(|name| !name.ends_with(".survived")).count()
    }

    /// How often in changes of a table, and somebody was killed.
    pub fn killed(&self, oid: u32) -> usize {
        let names = self.names();
        let own = |name: &&String| name.split('.').next() == Some(&oid.to_string());
        let is_killed = |name: &&String| !name.ends_with(".survived") && !names.contains(&format!("{name}.survived"));
        names.iter().filter(own).filter(is_killed).count()
    }

    fn names(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        files.filter_map(|file| file.file_name().into_string().ok()).collect()
    }
}
