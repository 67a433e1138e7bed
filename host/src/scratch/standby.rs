//! A standby of a scratch cluster.

use std::process::Command;

use super::{Auth, Cluster, ClusterOptions, SUPERUSER, Shutdown, make_directory, stderr_of};
use crate::error::{Error, Result};

impl Cluster {
    /// A hot standby of this cluster, which follows it through the slot `standby`. This
    /// one is stopped for as long as copying its data takes. `options` are the standby's;
    /// who may log in is as here.
    ///
    /// # Errors
    /// As [`Cluster::start`], and `scratch.standby` if the data cannot be copied.
    pub fn standby(&mut self, options: &ClusterOptions) -> Result<Cluster> {
        let directory = make_directory(options.parent.as_deref(), self.account.as_ref());
        let (directory, sweeper) = directory.map_err(|error| no_standby(&error))?;
        let mut standby = Cluster {
            binaries: self.binaries.clone(),
            settings: Vec::new(),
            auth: self.auth.clone(),
            port: 0,
            server: None,
            directory,
            sweeper,
            account: self.account.clone(),
        };
        self.halt(Shutdown::Fast)?;
        let copied = Command::new("cp").arg("-a").args([self.data(), standby.data()]).output();
        let copied = copied.map_err(|error| no_standby(&error))?;
        if !copied.status.success() {
            return Err(no_standby(&stderr_of(&copied)));
        }
        self.resume()?;
        self.psql("postgres", "SELECT pg_create_physical_replication_slot('standby', true)")?;
        standby.write_private(&standby.data().join("standby.signal"), b"").map_err(|error| no_standby(&error))?;
        let password = match &self.auth {
            Auth::Trust => String::new(),
            Auth::Scram(password) => format!(" password='{}'", password.replace('\\', "\\\\").replace('\'', "\\'")),
        };
        let primary = format!("host=127.0.0.1 port={} user={SUPERUSER} dbname=postgres{password}", self.port);
        standby.collect_settings(options)?;
        for (name, value) in
            [("primary_conninfo", primary.as_str()), ("primary_slot_name", "standby"), ("hot_standby_feedback", "on")]
        {
            standby.settings.insert(0, (name.to_owned(), value.to_owned()));
        }
        standby.launch_somewhere()?;
        Ok(standby)
    }
}

fn no_standby(error: &dyn std::fmt::Display) -> Error {
    Error::permanent("scratch.standby", format!("cannot make a standby of a scratch cluster: {error}"))
        .next("Point TMPDIR at a directory with room for a second copy.")
}
