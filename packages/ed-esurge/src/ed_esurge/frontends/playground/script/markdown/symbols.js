// Commands of LaTeX that stand for one symbol, an accent, a font or a function name.

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((one) => one.split("=")));

export const LETTERS = pairs(`
alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν
xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ
Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω ell=ℓ hbar=ℏ imath=ı jmath=ȷ Re=ℜ Im=ℑ aleph=ℵ infty=∞
partial=∂ nabla=∇ emptyset=∅ varnothing=∅ top=⊤ bot=⊥ angle=∠ triangle=△ prime=′ degree=° ldots=… cdots=⋯ vdots=⋮ ddots=⋱ dots=…`);

export const OPERATORS = pairs(`
times=× div=÷ cdot=⋅ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ le=≤ leq=≤ ge=≥ geq=≥ ne=≠
neq=≠ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ prec=≺ succ=≻ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆
supseteq=⊇ cup=∪ cap=∩ setminus=∖ land=∧ wedge=∧ lor=∨ vee=∨ neg=¬ lnot=¬ forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→
leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹ Leftarrow=⇐ Leftrightarrow=⇔ iff=⟺ mapsto=↦ uparrow=↑ downarrow=↓
longrightarrow=⟶ mid=∣ vert=| Vert=‖ parallel=∥ perp=⊥ therefore=∴ because=∵ langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋
lbrace={ rbrace=} colon=: backslash=\\`);

/** Operators with limits above and below in a displayed formula. */
export const LARGE = pairs("sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂");
export const FUNCTIONS = new Set("arccos arcsin arctan arg cos cosh cot csc deg det dim exp gcd ker lg ln log sec sin sinh tan tanh".split(" "));
export const LIMITS = new Set("lim limsup liminf max min sup inf argmax argmin Pr".split(" "));
export const ACCENTS = pairs("hat=^ widehat=^ bar=¯ overline=¯ tilde=~ widetilde=~ vec=→ dot=˙ ddot=¨ check=ˇ overrightarrow=→");
export const FONTS = { mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double-struck", mathcal: "script", mathscr: "script", mathfrak: "fraktur", mathsf: "sans-serif", mathtt: "monospace", mathrm: "normal", mathit: "italic" };
export const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", " ": ".25em", "!": "-.17em", quad: "1em", qquad: "2em" };

// First code points of A, a and 0 in the fonts. The letters that Unicode defined earlier are exceptions.
const POINTS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce], "double-struck": [0x1d538, 0x1d552, 0x1d7d8], script: [0x1d49c, 0x1d4b6, 0],
  fraktur: [0x1d504, 0x1d51e, 0], "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2], monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
const EARLIER = {
  "double-struck": pairs("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ"), script: pairs("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"), fraktur: pairs("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ"),
};

/** Return a letter or a digit in a font. */
export function inFont(letter, font) {
  const points = POINTS[font];
  if (!points || EARLIER[font]?.[letter]) return EARLIER[font]?.[letter] ?? letter;
  const begin = ["A", "a", "0"].findIndex((first, place) => letter >= first && letter < String.fromCharCode(first.charCodeAt(0) + (place === 2 ? 10 : 26)));
  return begin < 0 || !points[begin] ? letter : String.fromCodePoint(points[begin] + letter.charCodeAt(0) - "Aa0".charCodeAt(begin));
}
