//! What kind of address a name led to: which of them a plugin may reach.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The kind of an address, as far as it matters to who may dial it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    Public,
    /// The machine itself.
    Loopback,
    /// RFC 1918, RFC 6598 (shared by carriers), RFC 4193.
    Private,
    LinkLocal,
    /// Where clouds hand out credentials to whoever asks.
    Metadata,
    /// Unspecified, multicast, broadcast, reserved, documentation, and tunnels whose
    /// far end cannot be told.
    Special,
}

impl Range {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Range::Public => "public",
            Range::Loopback => "loopback",
            Range::Private => "private",
            Range::LinkLocal => "link-local",
            Range::Metadata => "metadata",
            Range::Special => "special-purpose",
        }
    }

    /// Of an address, and of the IPv4 address inside where an IPv6 one carries it.
    pub(crate) fn of(address: IpAddr) -> Range {
        match address {
            IpAddr::V4(v4) => of_v4(v4),
            IpAddr::V6(v6) => of_v6(v6),
        }
    }
}

/// Amazon, Google, Azure and others; Azure's wire server; Alibaba; Oracle.
const METADATA_V4: [Ipv4Addr; 4] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];
/// Amazon's over IPv6, and its container credentials.
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)];

/// IANA's special-purpose registry (RFC 6890 and its updates).
fn of_v4(address: Ipv4Addr) -> Range {
    let [a, b, c, _] = address.octets();
    if METADATA_V4.contains(&address) {
        return Range::Metadata;
    }
    match (a, b, c) {
        (127, ..) => Range::Loopback,
        (10, ..) | (172, 16..=31, _) | (192, 168, _) | (100, 64..=127, _) => Range::Private,
        (169, 254, _) => Range::LinkLocal,
        (0, ..)
        | (192, 0, 0)
        | (192, 0, 2)
        | (198, 18..=19, _)
        | (198, 51, 100)
        | (203, 0, 113)
        | (192, 88, 99)
        | (224.., ..) => Range::Special,
        _ => Range::Public,
    }
}

fn of_v6(address: Ipv6Addr) -> Range {
    if METADATA_V6.contains(&address) {
        return Range::Metadata;
    }
    let s = address.segments();
    let embedded = |high: u16, low: u16| of_v4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)));
    match s {
        [0, 0, 0, 0, 0, 0, 0, 1] => Range::Loopback,
        [0, 0, 0, 0, 0, 0, 0, 0] => Range::Special,
        // Mapped, translated (RFC 2765), and the old compatible form.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0, 0, 0, 0, 0xffff, 0, high, low] | [0, 0, 0, 0, 0, 0, high, low] => {
            embedded(high, low)
        }
        // NAT64 (RFC 6052); the locally assigned prefix (RFC 8215) is somebody's own.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => embedded(high, low),
        [0x64, 0xff9b, 1, ..] => Range::Private,
        // 6to4 (RFC 3056), with the network's IPv4 address behind the prefix.
        [0x2002, high, low, ..] => embedded(high, low),
        // Teredo, benchmarks, ORCHID, documentation.
        [0x2001, 0, ..]
        | [0x2001, 2, 0, ..]
        | [0x2001, 0x10..=0x2f, ..]
        | [0x2001, 0xdb8, ..]
        | [0x3fff, 0..=0xfff, ..] => Range::Special,
        // ISATAP (RFC 5214): an IPv4 address as the interface.
        [_, _, _, _, 0 | 0x200, 0x5efe, high, low] if embedded(high, low) != Range::Public => embedded(high, low),
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Range::Private,
        [0xfe80..=0xfebf, ..] => Range::LinkLocal,
        [0xff00..=0xffff, ..] => Range::Special,
        // Discard-only.
        [0x100, 0, 0, 0, ..] => Range::Special,
        // Global unicast is 2000::/3; nothing else is assigned.
        [0x2000..=0x3fff, ..] => Range::Public,
        _ => Range::Special,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_what_it_is_in_every_notation() {
        for (text, range) in [
            ("8.8.8.8", Range::Public),
            ("172.32.0.1", Range::Public),
            ("127.8.9.1", Range::Loopback),
            ("0.0.0.0", Range::Special),
            ("0.1.2.3", Range::Special),
            ("10.1.2.3", Range::Private),
            ("172.31.255.255", Range::Private),
            ("192.168.0.1", Range::Private),
            ("100.64.0.1", Range::Private),
            ("169.254.1.1", Range::LinkLocal),
            ("169.254.169.254", Range::Metadata),
            ("168.63.129.16", Range::Metadata),
            ("224.0.0.1", Range::Special),
            ("255.255.255.255", Range::Special),
            ("2606:4700::1111", Range::Public),
            ("::1", Range::Loopback),
            ("::", Range::Special),
            ("::ffff:127.0.0.1", Range::Loopback),
            ("::ffff:169.254.169.254", Range::Metadata),
            ("::127.0.0.1", Range::Loopback),
            ("::ffff:8.8.8.8", Range::Public),
            ("64:ff9b::7f00:1", Range::Loopback),
            ("64:ff9b::a9fe:a9fe", Range::Metadata),
            ("64:ff9b:1::1", Range::Private),
            ("2002:7f00:1::", Range::Loopback),
            ("2002:a00:1::1", Range::Private),
            ("2002:808:808::1", Range::Public),
            ("2001:0:1:2::", Range::Special),
            ("2001:db8::1", Range::Special),
            ("fd00:ec2::254", Range::Metadata),
            ("fd12::1", Range::Private),
            ("fe80::1", Range::LinkLocal),
            ("fe80::5efe:7f00:1", Range::Loopback),
            ("ff02::1", Range::Special),
        ] {
            assert_eq!(Range::of(text.parse().unwrap()), range, "{text}");
        }
    }
}
