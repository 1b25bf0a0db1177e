//! Which addresses may be dialled: those of the public internet and no others, unless a
//! destination's configuration allows private ones.
//!
//! Names are judged by the addresses that they resolve to, in the resolver of the client itself,
//! so that what is judged is what is dialled; literal addresses are judged before.

use std::net::SocketAddr;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::address::is_public;

/// A host is, or only resolves to, addresses that are not of the public internet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its address is not one of the public internet")]
pub struct PrivateAddress;

/// Resolves names as the system does and drops what is not public.
pub struct PublicOnly;

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> = found.filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err(PrivateAddress.into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}
